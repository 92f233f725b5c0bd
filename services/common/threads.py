"""Calls that wait, from asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


async def run_detached(
    function: Callable[Given, Result], *given: Given.args, **more: Given.kwargs
) -> Result:
    """As `asyncio.to_thread`, for calls that wait for long and change nothing.

    Whoever is cancelled meanwhile, or the process that ends, does not wait for the call to return.
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
            result = function(*given, **more)
        except Exception as error:  # noqa: BLE001 - whoever awaits gets it
            failure = error
        with suppress(RuntimeError):  # the loop has closed: nobody awaits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True).start()
    return await outcome
