"""What every route works with: the database, the object store, and the news of changes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool

from services.common.objectstore import ObjectStore

RECHECK_S = 0.5
"""Another replica of this service may have changed the state, so waits look again this often."""

T = TypeVar("T")


class Service:
    """Transactions on the database, objects in the store, and waiting for either to change."""

    def __init__(self, engine: Engine, store: ObjectStore) -> None:
        self.store = store
        self.probe = ObjectStore(store.settings, retries=0)
        """The same store for questions that want an answer now."""
        self.sessions = sessionmaker(engine, expire_on_commit=False)
        self._writers = ThreadPoolExecutor(16, thread_name_prefix="object-store")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waiting happens on this loop; transactions in threads tell it what they changed."""
        self._loop = loop

    @contextmanager
    def changing(self, run: str) -> Iterator[Session]:
        """A transaction on a run; whoever waits for the run looks again after its commit."""
        with self.sessions.begin() as session:
            yield session
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._announce, run)

    def _announce(self, run: str) -> None:
        waited_for = self._news.pop(run, None)
        if waited_for is not None:
            waited_for.set()

    @contextmanager
    def writing(self, key: str, data: bytes | None) -> Iterator[None]:
        """Stores `data`, if any, beside what the context does; ends when both have ended."""
        stored = None if data is None else self._writers.submit(self.store.put, key, data)
        try:
            yield
        finally:
            if stored is not None:
                stored.result()

    async def until(
        self, run: str, seconds: float, attempt: Callable[[], T], ready: Callable[[T], bool]
    ) -> T:
        """The first ready result of `attempt`, or its last one when the time is up.

        `attempt` runs in a thread; waiting takes none, so any number of requests may wait.
        """
        deadline = monotonic() + seconds
        while True:
            # Taken before the look: what changes during it wakes the wait after it.
            news = self._news[run]
            result = await run_in_threadpool(attempt)
            left = deadline - monotonic()
            if ready(result) or left <= 0:
                return result
            try:
                await asyncio.wait_for(news.wait(), min(left, RECHECK_S))
            except TimeoutError:
                continue
