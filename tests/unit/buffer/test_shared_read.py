"""Requests that wait for the same thing share the reads of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from services.buffer.service import SharedRead


class Reads:
    """Reads that a test lets end one by one, and that return their number."""

    def __init__(self) -> None:
        self.begun = 0
        self._may_end = threading.Semaphore(0)

    def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        assert self._may_end.acquire(timeout=30)
        return number

    def let_end(self) -> None:
        self._may_end.release()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_request_gets_a_read_that_began_after_it_and_shares_it() -> None:
    async def scenario() -> None:
        reads = Reads()
        shared = SharedRead(reads)
        first = asyncio.create_task(shared())
        await until(lambda: reads.begun == 1)
        # The running read may have missed what these are to see.
        later = [asyncio.create_task(shared()) for _ in range(50)]
        reads.let_end()
        assert await first == 1
        await until(lambda: reads.begun == 2)
        last = asyncio.create_task(shared())
        reads.let_end()
        assert await asyncio.gather(*later) == [2] * 50
        reads.let_end()
        assert await last == 3
        assert reads.begun == 3

    asyncio.run(scenario())


def test_a_cancelled_request_leaves_the_read_to_the_others() -> None:
    async def scenario() -> None:
        reads = Reads()
        shared = SharedRead(reads)
        cancelled, other = asyncio.create_task(shared()), asyncio.create_task(shared())
        await until(lambda: reads.begun == 1)
        cancelled.cancel()
        reads.let_end()
        assert await other == 1
        assert cancelled.cancelled()

    asyncio.run(scenario())


def test_all_requests_get_the_error_of_their_read_and_later_ones_read_again() -> None:
    async def scenario() -> None:
        answers = iter([ValueError("the database is gone"), 7])

        def read() -> int:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        shared = SharedRead(read)
        both = await asyncio.gather(shared(), shared(), return_exceptions=True)
        assert [str(error) for error in both] == ["the database is gone"] * 2
        assert await shared() == 7

    asyncio.run(scenario())
