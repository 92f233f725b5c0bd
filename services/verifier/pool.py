"""A warm pool of killable processes (spawn) that score responses.

The input is hostile by definition, so a response may hang or crash the process that scores it.
A thread cannot be stopped, a process can: each response has a deadline, measured from the moment
its process turns to it, and one that misses it costs that deadline and a restart, nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from bapo_core.tasks import get_task
from services.verifier.wire import ItemVerdict

LONGEST_RESPONSE = 200_000
"""Characters; more is refused unread."""
MEMORY_BYTES = 2 << 30

Work = tuple[dict[str, Any], str]
_context = multiprocessing.get_context("spawn")


def _worker(connection: Connection) -> None:
    """Scores until the pool closes the connection."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            name, options, work = connection.recv()
        except EOFError:
            return
        task = get_task(name, **options)
        for payload, response in work:
            verdict = task.verify(payload, response)
            connection.send((verdict.reward, str(verdict.status), verdict.answer))


def _exit_with_parent() -> None:
    """Even a worker that hangs must not outlive a killed verifier."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Process:
    """One worker process and the pipe to it."""

    def __init__(self) -> None:
        self.connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_worker, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


class VerifierPool:
    """`verify` scores a batch on the next free process, replacing it whenever it fails."""

    def __init__(self, workers: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._free: queue.Queue[_Process] = queue.Queue()
        for _ in range(workers):
            self._free.put(_Process())

    def close(self) -> None:
        while not self._free.empty():
            self._free.get().kill()

    @contextmanager
    def _borrowed(self) -> Iterator[list[_Process]]:
        """A process in a list of one, so that the borrower can put another in its place."""
        held = [self._free.get()]
        try:
            yield held
        except BaseException:
            held[0].kill()
            held[0] = _Process()
            raise
        finally:
            self._free.put(held[0])

    def verify(self, task: str, options: dict[str, Any], work: Sequence[Work]) -> list[ItemVerdict]:
        """A verdict for each (payload, response), in order; never raises for what they hold."""
        verdicts: list[ItemVerdict] = []
        with self._borrowed() as held:
            while len(verdicts) < len(work):
                verdicts += self._run(held[0], task, options, work[len(verdicts) :])
                if len(verdicts) < len(work):
                    status = self._why(held[0])
                    held[0].kill()
                    held[0] = _Process()
                    verdicts.append(ItemVerdict(reward=0.0, status=status))
        return verdicts

    def _run(
        self, process: _Process, task: str, options: dict[str, Any], work: Sequence[Work]
    ) -> list[ItemVerdict]:
        """Verdicts up to the first response that misses its deadline or crashes the process."""
        cut = [(p, r if len(r) <= LONGEST_RESPONSE else "") for p, r in work]
        verdicts: list[ItemVerdict] = []
        try:
            process.connection.send((task, options, cut))
            for _, response in work:
                if not process.connection.poll(self.deadline_s):
                    return verdicts
                reward, status, extracted = process.connection.recv()
                if len(response) > LONGEST_RESPONSE:
                    reward, status, extracted = 0.0, "too_large", None
                verdicts.append(ItemVerdict(reward=reward, status=status, extracted=extracted))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # The process died: the response that it was at gets the blame.
            return verdicts
        return verdicts

    @staticmethod
    def _why(process: _Process) -> str:
        """Still alive: it missed its deadline. Dead: the response crashed it."""
        return "crashed" if wait([process._process.sentinel], timeout=0.05) else "timeout"
