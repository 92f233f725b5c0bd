"""State that all routes share: the database, the object store, and notification of changes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Annotated, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool

from services.buffer.database import OutageWatch
from services.buffer.storage.vocabularies import Vocabularies
from services.common.objectstore import ObjectStore

RECHECK_S = 0.5
"""Seconds between checks while waiting: another replica of this service may make the change."""

T = TypeVar("T")


class SharedRead(Generic[T]):
    """One read of the database at a time, whose result all requests that wait for it get.

    A request gets the result of a read that began after it had asked, and therefore sees every
    change that was committed before.
    """

    def __init__(self, attempt: Callable[[], T]) -> None:
        self._attempt = attempt
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """Returns the result of the next read, or raises what it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._running))
        # The other requests still wait for the read if this one is cancelled.
        return await asyncio.shield(self._next)

    async def _read_after(self, running: asyncio.Task[T] | None) -> T:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        return await run_in_threadpool(self._attempt)


class Service:
    """Runs transactions, stores objects, and waits for changes of either."""

    def __init__(self, engine: Engine, store: ObjectStore) -> None:
        self.store = store
        self.probe = ObjectStore(store.settings, retries=0)
        """Client of the same store for health checks, which must not wait for retries."""
        self.outages = OutageWatch(engine)
        self.sessions = sessionmaker(engine, expire_on_commit=False)
        self.vocabularies = Vocabularies(store)
        self._writers = ThreadPoolExecutor(16, thread_name_prefix="object-store")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changes: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._waits_end = False
        self._shared_reads: WeakValueDictionary[str, SharedRead[Any]] = WeakValueDictionary()

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the event loop on which `wait_until` waits, and which transactions notify."""
        self._loop = loop

    @contextmanager
    def write_transaction(self, run: str) -> Iterator[Session]:
        """Opens a transaction on a run, and wakes all `wait_until` of the run after its commit."""
        with self.sessions.begin() as session:
            yield session
        self.wake_waiting(run)

    def wake_waiting(self, run: str) -> None:
        """Makes all `wait_until` of the run look again."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify, run)

    def _notify(self, run: str) -> None:
        change = self._changes.pop(run, None)
        if change is not None:
            change.set()

    def end_waits(self) -> None:
        """Makes every `wait_until`, from now on, return the result that it has; called on the loop.

        A service that stops would otherwise wait for them. Clients ask again after any wait.
        """
        self._waits_end = True
        for run in list(self._changes):
            self._notify(run)

    @contextmanager
    def store_alongside(self, key: str, data: bytes | None) -> Iterator[None]:
        """Stores `data` in a thread while the context runs, and returns when both have ended.

        Stores nothing when `data` is None. Raises what `ObjectStore.put` raises.
        """
        write = None if data is None else self._writers.submit(self.store.put, key, data)
        try:
            yield
        finally:
            if write is not None:
                write.result()

    async def wait_until(
        self, run: str, seconds: float, attempt: Callable[[], T], ready: Callable[[T], bool]
    ) -> T:
        """Returns the first ready result of `attempt`, or its last one after `seconds`, or after
        `end_waits`.

        Calls `attempt` in a thread, after every `wake_waiting` of the run and every `RECHECK_S`.
        Waiting itself takes no thread, so any number of requests may wait.
        """
        return await self._wait_until(run, seconds, partial(run_in_threadpool, attempt), ready)

    async def wait_until_shared(
        self, run: str, seconds: float, attempt: Callable[[], T], ready: Callable[[T], bool]
    ) -> T:
        """Waits as `wait_until` does; all requests that wait for the run share each attempt.

        For what every replica of a large run waits for. `attempt` must do the same for all of
        them.
        """
        read = self._shared_reads.setdefault(run, SharedRead(attempt))
        return await self._wait_until(run, seconds, read, ready)

    async def _wait_until(
        self,
        run: str,
        seconds: float,
        attempt: Callable[[], Awaitable[T]],
        ready: Callable[[T], bool],
    ) -> T:
        deadline = monotonic() + seconds
        while True:
            # Taken before the attempt: a change during the attempt ends the wait after it.
            change = self._changes[run]
            result = await attempt()
            remaining = deadline - monotonic()
            if ready(result) or remaining <= 0 or self._waits_end:
                return result
            try:
                await asyncio.wait_for(change.wait(), min(remaining, RECHECK_S))
            except TimeoutError:
                continue


async def get_service(request: Request) -> Service:
    """Returns the service of the application that handles the request."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]
