"""A pool of killable worker processes that score responses.

Responses are hostile by definition: one may hang or crash the process that scores it. A thread
cannot be killed, but a process can. Each response has a deadline, measured from the moment its
process begins it. A response that misses it costs that deadline and its process, and nothing else,
because a spare process is ready to take over.

Batches are cut into chunks. Each worker takes its next chunk from the next batch in turn, so that
one batch uses all workers and no batch waits behind the hostile responses of another.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bapo_core.errors import BapoError, PayloadError, TransientError
from bapo_core.outcomes import Cause, Loss, Outcome, judge_losses
from services.verifier.api.wire import LONGEST_RESPONSE, ItemVerdict, VerifyItem
from services.verifier.process import (
    NOT_BEGUN,
    NoWorker,
    TaskKey,
    TaskRefused,
    WorkerLimits,
    WorkerLost,
    WorkerProcess,
)
from services.verifier.worker import Result, Work, failed

__all__ = ["Batch", "Busy", "Draining", "TaskRefused", "VerifierPool"]

log = logging.getLogger(__name__)

SMALLEST_CHUNK = 4
CHUNK_CHARACTERS = 2_000_000
"""Approximate limit of a chunk, computed from the mean length of the batch's responses."""
MAX_TRIES = 3
"""Workers that may be lost while they prepare a task, before the task is blamed."""
_STATUSES = {
    Outcome.TIMED_OUT: "timeout",
    Outcome.CRASHED: "crashed",
    Outcome.VERIFIER_LOST: "verifier_lost",
}
_TOO_LONG = failed("too_large")
_RETRY_START_S = 1.0


class Busy(TransientError):
    """The queue is full."""


class Draining(TransientError):
    """The verifier is shutting down and accepts no requests."""


@dataclass(eq=False)
class Batch:
    """Responses to score with one task; the future `done` gives their results, in order."""

    task: TaskKey
    work: Sequence[Work]
    done: Future[list[Result]] = field(default_factory=Future)
    results: list[Result | None] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges [start, stop) of items that no worker has."""
    left: int = 0
    """Number of items without a result."""
    too_long: set[int] = field(default_factory=set)
    """Items longer than `LONGEST_RESPONSE`, whose text no worker gets."""
    largest_chunk: int = 1
    losses: dict[int, list[Loss]] = field(default_factory=dict)
    """Workers that were lost with an item that has no result, by the item's index."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    batch: Batch
    start: int
    stop: int
    alone: bool = False
    """Whether its item gets a process of its own, because one was lost with it."""


class VerifierPool:
    """Scores batches on `workers` processes, and keeps one more as a spare.

    deadline_s: seconds that scoring one response may take.
    memory_mb: MiB of memory that scoring one response may take.
    queue: maximum number of responses in progress or waiting.
    readable, hidden: as in `WorkerLimits`.
    """

    def __init__(
        self,
        workers: int,
        deadline_s: float,
        *,
        memory_mb: int = 1024,
        queue: int = 65_536,
        readable: Sequence[str] = (),
        hidden: str = "",
    ) -> None:
        self.workers, self.deadline_s, self.queue = workers, deadline_s, queue
        self.restarts: Counter[str] = Counter()
        """Number of processes that ended, by their fate: timeout, crashed, retired."""
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._queued = 0
        """Responses in progress or waiting."""
        self._draining = self._closed = False
        limits = WorkerLimits(memory_mb << 20, tuple(readable), hidden)
        self._spare = _Spare(limits)
        self._slots = [_Slot(self, self._spare, limits) for _ in range(workers)]
        for slot in self._slots:
            slot.start()

    # ---- for callers ----------------------------------------------------------------------------

    def verify(self, task: str, options: dict[str, Any], work: Sequence[Work]) -> list[ItemVerdict]:
        """Returns a verdict for each (payload, response), in order, whatever they contain.

        Raises `TaskRefused` for the task or its options, `PayloadError` for a payload, `Busy` and
        `Draining`.
        """
        return [
            ItemVerdict(reward=reward, status=status, extracted=answer, detail=detail, parts=parts)
            for reward, status, answer, detail, parts in self.submit(
                task, options, work
            ).done.result()
        ]

    def verify_items(
        self, task: str, options: dict[str, Any], items: Sequence[VerifyItem]
    ) -> list[list[ItemVerdict]]:
        """Returns the verdicts on each item's responses, as `VerifierClient.verify` does."""
        work = [(item.payload, response) for item in items for response in item.responses]
        verdicts = iter(self.verify(task, options, work))
        return [[next(verdicts) for _ in item.responses] for item in items]

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
            if self._queued + batch.left > self.queue:
                raise Busy(
                    f"{len(work)} responses do not fit in the queue, which has {self._queued} "
                    f"of {self.queue} (BAPO_VERIFIER_QUEUE); send them again later"
                )
            if batch.left:
                batch.waiting.append((0, len(work)))
                self._batches.append(batch)
                self._queued += batch.left
                self._changed.notify_all()
        if not work:
            batch.done.set_result([])
        return batch

    def abandon(self, batch: Batch, error: BaseException | None = None) -> None:
        """Drops the rest of `batch`: cancels its future, or fails it with `error`."""
        with self._changed:
            if batch in self._batches:
                self._batches.remove(batch)
            self._queued -= batch.left
            batch.left = 0
            batch.waiting.clear()
            self._changed.notify_all()
        if error is None:
            batch.done.cancel()
            return
        with suppress(InvalidStateError):  # finished or cancelled before
            batch.done.set_exception(error)

    def waiting(self) -> int:
        """Returns the number of responses in progress or waiting."""
        return self._queued

    def ready(self) -> bool:
        """Whether batches are accepted and a worker has started."""
        return not self._draining and any(slot.warm for slot in self._slots)

    def drain(self, timeout_s: float) -> bool:
        """Accepts no new batches and waits for the others; returns whether all were finished."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._queued == 0, timeout_s)

    def close(self) -> None:
        """Kills the workers; unfinished batches fail with `Draining`."""
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
        """Waits for the next chunk; returns None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next_batch() is not None)
            batch = None if self._closed else self._next_batch()
            if batch is None:
                return None
            # To the back of the queue, so that batches take turns.
            self._batches.remove(batch)
            self._batches.append(batch)
            return self._cut(batch)

    def _next_batch(self) -> Batch | None:
        return next((batch for batch in self._batches if batch.waiting), None)

    def _cut(self, batch: Batch) -> _Chunk:
        """Cuts the next chunk: large ones first, for little overhead, and small ones last, so that
        all workers finish at about the same time."""
        waiting = sum(stop - start for start, stop in batch.waiting)
        size = min(max(SMALLEST_CHUNK, waiting // (2 * self.workers)), batch.largest_chunk)
        start, stop = batch.waiting.popleft()
        end = min(stop, start + size)
        # An item with which a worker was lost is scored alone, so that it is clear what the cause
        # is. `_settle_loss` gives such items back as ranges of one.
        alone = start in batch.losses
        if alone:
            end = start + 1
        if end < stop:
            batch.waiting.appendleft((end, stop))
        return _Chunk(batch, start, end, alone)

    def record(self, batch: Batch, start: int, results: Sequence[Result]) -> None:
        """Stores the results of the items from `start` on, and finishes the batch with the last."""
        with self._changed:
            if batch.left == 0:
                return  # abandoned
            batch.results[start : start + len(results)] = results
            batch.left -= len(results)
            self._queued -= len(results)
            finished = batch.left == 0
            if finished:
                self._batches.remove(batch)
                self._changed.notify_all()
        if finished:
            for index in batch.too_long:
                batch.results[index] = _TOO_LONG
            # The client may disconnect, and the batch be abandoned, at this moment.
            with suppress(InvalidStateError):
                batch.done.set_result([result for result in batch.results if result is not None])

    def count_restart(self, fate: str) -> None:
        with self._changed:
            self.restarts[fate] += 1

    def give_back(self, batch: Batch, start: int, stop: int) -> None:
        """Puts the items [start, stop), which have no result, back into the queue."""
        with self._changed:
            if batch.left and start < stop:
                batch.waiting.appendleft((start, stop))
                self._changed.notify_all()


class _Slot(threading.Thread):
    """A thread that feeds one worker process at a time."""

    def __init__(self, pool: VerifierPool, spare: _Spare, limits: WorkerLimits) -> None:
        super().__init__(name="verifier-slot", daemon=True)
        self._pool, self._spare, self._limits = pool, spare, limits
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
        # Not started by the caller's thread: the kernel ends a process with the thread that
        # started it.
        try:
            self._process = self._start_process()
            self.warm = True
        except BapoError as error:
            log.error("%s", error)
        while (chunk := self._pool.next_chunk()) is not None:
            try:
                self._score(chunk)
            except (TaskRefused, PayloadError) as error:
                self._pool.abandon(chunk.batch, error)
            except Exception as error:
                log.exception("scoring failed")
                self._pool.abandon(chunk.batch, BapoError(f"scoring failed: {error}"))
        if self._process is not None:
            self._process.close()

    def _score(self, chunk: _Chunk) -> None:
        if chunk.alone:
            self._leave_used_process()
        process = self._prepare_process(chunk.batch.task)
        if self._stopping:
            return
        process.dispatch(chunk.batch.work[chunk.start : chunk.stop])
        position = chunk.start
        while position < chunk.stop and process.fate is None:
            results = process.receive(self._pool.deadline_s)[: chunk.stop - position]
            self._pool.record(chunk.batch, position, results)
            position += len(results)
        if process.fate is not None:
            self._settle_loss(chunk, position, process)

    def _settle_loss(self, chunk: _Chunk, position: int, process: WorkerProcess) -> None:
        """Settles a chunk whose process has ended with results for the items before `position`.

        The items without a result go back into the queue, but for one that has lost processes
        as often as `judge_losses` says.
        """
        if self._stopping:
            return
        assert process.fate is not None
        self._pool.count_restart(process.fate)
        index, _ = process.position()
        # A process that had begun nothing may have died before it got the items.
        culprit = chunk.start + (0 if index == NOT_BEGUN else index)
        if process.fate == "retired" or not position <= culprit < chunk.stop:
            self._pool.give_back(chunk.batch, position, chunk.stop)
            return
        cause = Cause.UNBEGUN if index == NOT_BEGUN else process.loss
        losses = chunk.batch.losses.setdefault(culprit, [])
        losses.append(Loss(cause, alone=chunk.alone))
        outcome = judge_losses(losses)
        self._pool.give_back(chunk.batch, culprit + 1, chunk.stop)
        if outcome is None:
            self._pool.give_back(chunk.batch, culprit, culprit + 1)
        # Items that were scored, but whose results had not been sent when the process ended.
        self._pool.give_back(chunk.batch, position, culprit)
        if outcome is not None:
            self._pool.record(chunk.batch, culprit, [failed(_STATUSES[outcome])])

    def _leave_used_process(self) -> None:
        """Ends the present process if it has scored other items."""
        process = self._process
        if process is not None and process.used:
            process.close()
            self._process = None

    def _start_process(self) -> WorkerProcess:
        process = WorkerProcess(self._limits)
        process.wait_ready()
        return process

    def _prepare_process(self, task: TaskKey) -> WorkerProcess:
        """Returns a process that has prepared `task`. Raises `TaskRefused` or `WorkerLost`."""
        tries = 0
        while True:
            try:
                process = self._running_process(task)
                process.prepare(task)
            except NoWorker as error:
                if self._stopping:
                    raise
                log.error("%s; trying again", error)
                time.sleep(_RETRY_START_S)
                continue
            except WorkerLost as error:
                # The process may have ended for another reason; only a task that ends all fails.
                tries += 1
                if tries == MAX_TRIES or self._stopping:
                    raise
                log.warning("%s; trying again with another process", error)
                continue
            self._spare.task = task
            return process

    def _running_process(self, task: TaskKey) -> WorkerProcess:
        """Returns a process that may prepare `task`."""
        process = self._process
        if process is not None and not (process.idle() and process.may_prepare(task)):
            process.close()
            self._process = None
        if self._process is None:
            self._process = self._spare.take(task) or self._start_process()
            self.warm = True
        return self._process


class _Spare(threading.Thread):
    """A thread that keeps a spare process ready, with the latest task prepared."""

    def __init__(self, limits: WorkerLimits) -> None:
        super().__init__(name="verifier-spare", daemon=True)
        self._limits = limits
        self.task: TaskKey | None = None
        self._changed = threading.Condition()
        self._ready: WorkerProcess | None = None
        self._closed = False
        self.start()

    def take(self, task: TaskKey) -> WorkerProcess | None:
        """Returns the spare process, or None if it is not ready or may not prepare `task`."""
        with self._changed:
            process, self._ready = self._ready, None
            self._changed.notify_all()
        if process is None or (process.idle() and process.may_prepare(task)):
            return process
        process.close()
        return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.join()
        if self._ready is not None:
            self._ready.close()

    def run(self) -> None:
        while not self._closed:
            process = self._start_process()
            with self._changed:
                self._ready = process
                self._changed.notify_all()
                if process is None:
                    self._changed.wait_for(lambda: self._closed, _RETRY_START_S)
                else:
                    self._changed.wait_for(lambda: self._closed or self._ready is None)

    def _start_process(self) -> WorkerProcess | None:
        """Returns a process with the latest task prepared, or None if it does not start."""
        process = None
        try:
            process = WorkerProcess(self._limits)
            process.wait_ready()
            if self.task is not None:
                process.prepare(self.task)
        except BapoError as error:
            log.error("%s", error)
            if process is not None and process.fate is not None:
                process.close()
                return None
        return process
