"""Blocking calls from asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


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

    def settle(result: Result | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            failure = error
        with suppress(RuntimeError):  # the loop has closed, so the caller has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True).start()
    return await outcome
