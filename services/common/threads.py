"""Blocking calls in threads that nothing waits for at the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


def start_detached(function: Callable[[], Result]) -> Future[Result]:
    """Calls a function in a daemon thread, and returns its result or exception to come."""
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised to who asks for the result
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome


async def run_detached(
    function: Callable[Parameters, Result],
    *arguments: Parameters.args,
    **keywords: Parameters.kwargs,
) -> Result:
    """Runs a blocking call in a daemon thread and returns its result, or raises its exception.

    For calls that wait for long and change nothing: neither a cancellation of the caller nor the
    end of the process waits for the call to return. The threads of `asyncio.to_thread` are joined
    at exit, and so are those of `anyio.to_thread.run_sync(..., abandon_on_cancel=True)`.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(done: Future[Result]) -> None:
        if outcome.done():
            return
        error = done.exception()
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(done.result())

    def notify(done: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop has closed, so the caller has ended
            loop.call_soon_threadsafe(settle, done)

    start_detached(partial(function, *arguments, **keywords)).add_done_callback(notify)
    return await outcome
