"""A warm pool of killable processes that score responses.

The input is hostile by definition, so a response may hang or crash the process that scores it.
A thread cannot be stopped, a process can: each response has a deadline, measured from the moment
its process turns to it, and one that misses it costs that deadline and its process, nothing else.
A spare process stands ready, so nobody waits for the next one to start.

Batches are cut into chunks. Each worker takes its next chunk from the next batch in turn, so that
one batch uses all workers and none waits behind another's hostile items.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bapo_core.errors import BapoError
from services.verifier.api.wire import LONGEST_RESPONSE, ItemVerdict
from services.verifier.process import UNBEGUN, TaskKey, TaskRefused, WorkerProcess
from services.verifier.worker import Result, Work

__all__ = ["Batch", "Busy", "Draining", "TaskRefused", "VerifierPool"]

log = logging.getLogger(__name__)

SMALLEST_CHUNK = 4
CHUNK_CHARACTERS = 2_000_000
"""About the most in a chunk, by the mean length of the batch's responses."""
_TOO_LONG: Result = (0.0, "too_large", None, None)
_RETRY_START_S = 1.0
UNBEGUN_AT_MOST = 3


class Busy(BapoError):
    """As many responses wait as may wait."""


class Draining(BapoError):
    """The verifier is shutting down and takes no new work."""


@dataclass(eq=False)
class Batch:
    """Responses to score with one task. `done` gives their results, in order."""

    task: TaskKey
    work: Sequence[Work]
    done: Future[list[Result]] = field(default_factory=Future)
    results: list[Result | None] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges of items that no worker has yet."""
    left: int = 0
    """Items without a result."""
    too_long: set[int] = field(default_factory=set)
    """Items that no worker gets to read."""
    largest_chunk: int = 1
    unbegun: int = 0
    """How often a worker has ended before it began its chunk."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    batch: Batch
    start: int
    stop: int


class VerifierPool:
    """Scores batches on `workers` processes.

    A response gets `deadline_s` seconds and `memory_mb` MiB; at most `queue` responses may be
    under way or waiting.
    """

    def __init__(
        self, workers: int, deadline_s: float, *, memory_mb: int = 1024, queue: int = 65_536
    ) -> None:
        self.workers, self.deadline_s, self.queue = workers, deadline_s, queue
        self.restarts: Counter[str] = Counter()
        """Processes that ended, by why: timeout, crashed, retired."""
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._under_way = 0
        self._draining = self._closed = False
        self._spare = _Spare(memory_mb << 20)
        self._slots = [_Slot(self, self._spare, memory_mb << 20) for _ in range(workers)]
        for slot in self._slots:
            slot.start()

    # ---- for callers ----------------------------------------------------------------------------

    def verify(self, task: str, options: dict[str, Any], work: Sequence[Work]) -> list[ItemVerdict]:
        """A verdict for each (payload, response), in order; never raises for what they hold.

        Raises `TaskRefused` for the task or its options, `Busy` and `Draining`.
        """
        return [
            ItemVerdict(reward=reward, status=status, extracted=answer, detail=detail)
            for reward, status, answer, detail in self.submit(task, options, work).done.result()
        ]

    def submit(self, task: str, options: dict[str, Any], work: Sequence[Work]) -> Batch:
        """Queues (payload, response) pairs. Raises `Busy` or `Draining`."""
        batch = Batch((task, json.dumps(options, sort_keys=True)), work, left=len(work))
        batch.results = [None] * len(work)
        lengths = [len(response) for _, response in work]
        if max(lengths, default=0) > LONGEST_RESPONSE:
            batch.too_long = {n for n, length in enumerate(lengths) if length > LONGEST_RESPONSE}
            batch.work = [
                (payload, "" if n in batch.too_long else response)
                for n, (payload, response) in enumerate(work)
            ]
        batch.largest_chunk = max(1, CHUNK_CHARACTERS * len(work) // max(1, sum(lengths)))
        with self._changed:
            if self._draining:
                raise Draining("the verifier is shutting down; send this again to its successor")
            if self._under_way + batch.left > self.queue:
                raise Busy(
                    f"{self._under_way} responses wait and {self.queue} may (BAPO_VERIFIER_QUEUE); "
                    f"send these {len(work)} again later"
                )
            if batch.left:
                batch.waiting.append((0, len(work)))
                self._batches.append(batch)
                self._under_way += batch.left
                self._changed.notify_all()
        if not work:
            batch.done.set_result([])
        return batch

    def abandon(self, batch: Batch, error: BaseException | None = None) -> None:
        """Nobody wants the rest of `batch`, or it cannot be had because of `error`."""
        with self._changed:
            if batch in self._batches:
                self._batches.remove(batch)
            self._under_way -= batch.left
            batch.left = 0
            batch.waiting.clear()
            self._changed.notify_all()
        if error is None:
            batch.done.cancel()
            return
        with suppress(InvalidStateError):  # answered before
            batch.done.set_exception(error)

    def waiting(self) -> int:
        """Responses under way or waiting."""
        return self._under_way

    def ready(self) -> bool:
        """Whether work is taken and a worker stands ready for it."""
        return not self._draining and any(slot.warm for slot in self._slots)

    def spare_ready(self) -> bool:
        """Whether a process stands ready to take the place of another."""
        return self._spare.ready()

    def drain(self, timeout_s: float) -> bool:
        """Takes no new work and waits for what is under way; whether it all got done in time."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._under_way == 0, timeout_s)

    def close(self) -> None:
        """Kills the workers; what is under way fails with `Draining`."""
        with self._changed:
            self._draining = self._closed = True
            self._changed.notify_all()
        self._spare.close()
        for slot in self._slots:
            slot.stop()
        for batch in list(self._batches):
            self.abandon(batch, Draining("the verifier has shut down; send this again"))

    # ---- for the slots --------------------------------------------------------------------------

    def next_chunk(self) -> _Chunk | None:
        """Waits for work; None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next_batch() is not None)
            batch = None if self._closed else self._next_batch()
            if batch is None:
                return None
            # It goes to the back, so that batches take turns.
            self._batches.remove(batch)
            self._batches.append(batch)
            return self._cut(batch)

    def _next_batch(self) -> Batch | None:
        return next((batch for batch in self._batches if batch.waiting), None)

    def _cut(self, batch: Batch) -> _Chunk:
        """Large chunks first, for little overhead; small ones last, so that all end together."""
        waiting = sum(stop - start for start, stop in batch.waiting)
        size = min(max(SMALLEST_CHUNK, waiting // (2 * self.workers)), batch.largest_chunk)
        start, stop = batch.waiting.popleft()
        end = min(stop, start + size)
        if end < stop:
            batch.waiting.appendleft((end, stop))
        return _Chunk(batch, start, end)

    def record(self, batch: Batch, start: int, results: Sequence[Result]) -> None:
        """Results of the items from `start` on."""
        with self._changed:
            if batch.left == 0:
                return  # abandoned
            batch.results[start : start + len(results)] = results
            batch.left -= len(results)
            self._under_way -= len(results)
            finished = batch.left == 0
            if finished:
                self._batches.remove(batch)
                self._changed.notify_all()
        if finished:
            for index in batch.too_long:
                batch.results[index] = _TOO_LONG
            # The client may hang up at this very moment.
            with suppress(InvalidStateError):
                batch.done.set_result([result for result in batch.results if result is not None])

    def count_restart(self, why: str) -> None:
        with self._changed:
            self.restarts[why] += 1

    def give_back(self, batch: Batch, start: int, stop: int) -> None:
        """Items that were handed out and have no result."""
        with self._changed:
            if batch.left and start < stop:
                batch.waiting.appendleft((start, stop))
                self._changed.notify_all()


class _Slot(threading.Thread):
    """One worker process at a time, and the thread that feeds it."""

    def __init__(self, pool: VerifierPool, spare: _Spare, memory_bytes: int) -> None:
        super().__init__(name="verifier-slot", daemon=True)
        self._pool, self._spare, self._memory_bytes = pool, spare, memory_bytes
        self._process: WorkerProcess | None = None
        self._stopping = False
        self.warm = False
        """Whether its process has started."""

    def stop(self) -> None:
        self._stopping = True
        process = self._process
        if process is not None:
            process.kill()
        self.join()

    def run(self) -> None:
        # Started by this thread: the kernel ends a process with the thread that started it.
        try:
            self._process = self._start_one()
            self.warm = True
        except BapoError as error:
            log.error("%s", error)
        while (chunk := self._pool.next_chunk()) is not None:
            try:
                self._score(chunk)
            except TaskRefused as error:
                self._pool.abandon(chunk.batch, error)
            except Exception as error:
                log.exception("scoring failed")
                self._pool.abandon(chunk.batch, BapoError(f"scoring failed: {error}"))
        if self._process is not None:
            self._process.close()

    def _score(self, chunk: _Chunk) -> None:
        process = self._fit(chunk.batch.task)
        if self._stopping:
            return
        process.dispatch(chunk.batch.work[chunk.start : chunk.stop])
        position = chunk.start
        while position < chunk.stop and process.fate is None:
            results = process.receive(self._pool.deadline_s)[: chunk.stop - position]
            self._pool.record(chunk.batch, position, results)
            position += len(results)
        if process.fate is not None:
            self._settle(chunk, position, process)

    def _settle(self, chunk: _Chunk, position: int, process: WorkerProcess) -> None:
        """The process has ended with results up to `position`: who is to blame, who goes on."""
        if self._stopping:
            return
        assert process.fate is not None
        self._pool.count_restart(process.fate)
        index, _ = process.position()
        at = chunk.start + index
        if index == UNBEGUN:
            # It may have died before it had them: nobody's fault, unless it happens every time.
            chunk.batch.unbegun += 1
            at = chunk.start if chunk.batch.unbegun > UNBEGUN_AT_MOST else -1
        if process.fate == "retired" or not position <= at < chunk.stop:
            self._pool.give_back(chunk.batch, position, chunk.stop)
            return
        self._pool.give_back(chunk.batch, at + 1, chunk.stop)
        # Scored, but not yet sent when the process ended.
        self._pool.give_back(chunk.batch, position, at)
        self._pool.record(chunk.batch, at, [(0.0, process.fate, None, None)])

    def _start_one(self) -> WorkerProcess:
        process = WorkerProcess(self._memory_bytes)
        process.wait_ready()
        return process

    def _fit(self, task: TaskKey) -> WorkerProcess:
        """A live process with the task prepared. Raises `TaskRefused` or `BapoError`."""
        tries = 0
        while True:
            process = self._live_one()
            try:
                process.prepare(task)
            except TaskRefused:
                raise
            except BapoError as error:
                # It may have died of something else; a task that kills every one is told so.
                tries += 1
                if tries == UNBEGUN_AT_MOST or self._stopping:
                    raise
                log.warning("%s; another one is tried", error)
                continue
            self._spare.task = task
            return process

    def _live_one(self) -> WorkerProcess:
        if self._process is None or not self._process.idle():
            if self._process is not None:
                self._process.close()
            self._process = self._spare.take() or self._start_one()
            self.warm = True
        return self._process


class _Spare(threading.Thread):
    """Keeps one more process ready, with the latest task prepared."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(name="verifier-spare", daemon=True)
        self._memory_bytes = memory_bytes
        self.task: TaskKey | None = None
        self._changed = threading.Condition()
        self._ready: WorkerProcess | None = None
        self._closed = False
        self.start()

    def take(self) -> WorkerProcess | None:
        """The process, if it is ready."""
        with self._changed:
            process, self._ready = self._ready, None
            self._changed.notify_all()
        if process is None or process.idle():
            return process
        process.close()
        return None

    def ready(self) -> bool:
        return self._ready is not None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.join()
        if self._ready is not None:
            self._ready.close()

    def run(self) -> None:
        while not self._closed:
            process = self._warmed()
            with self._changed:
                self._ready = process
                self._changed.notify_all()
                if process is None:
                    self._changed.wait_for(lambda: self._closed, _RETRY_START_S)
                else:
                    self._changed.wait_for(lambda: self._closed or self._ready is None)

    def _warmed(self) -> WorkerProcess | None:
        process = WorkerProcess(self._memory_bytes)
        try:
            process.wait_ready()
            if self.task is not None:
                process.prepare(self.task)
        except BapoError as error:
            log.error("%s", error)
            if process.fate is not None:
                process.close()
                return None
        return process
