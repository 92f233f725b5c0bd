"""`python -m services.verifier.worker`: the process in which hostile responses are scored.

It imports the tasks and the standard library only, so that it starts in a tenth of a second. It
gets no variable that may hold a secret, and confines itself (`services.verifier.confinement`)
before it imports a task. It reads pickles, which come from the pool, and writes JSON, because the
pool must not unpickle data of a process that may be compromised.

    pool → worker                            worker → pool
                                             [what the kernel cannot confine, ...], at the start
    ("prepare", name, options)               null, or the reason why the task cannot be made
    ("score", [(payload, response), ...])    messages of [[result, ...], retiring, refusal]

A refusal is the reason why a payload cannot be verified; no result follows it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import pickle
import re
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bapo_core.errors import PayloadError, RewardError, TaskError
from bapo_core.reward_files import FUNCTION
from bapo_core.tasks import Task, get_task
from bapo_core.tasks.base import MAX_REWARD
from services.common.errors import describe_error
from services.verifier.confinement import confine

Work = tuple[Mapping[str, Any], str]
"""(payload, response)."""
Result = tuple[float, str, str | None, str | None, dict[str, float]]
"""(reward, status, extracted answer, error: for the status `crashed` only, parts of the reward)."""

FLUSH_S = 0.05
"""Results are sent at this interval: a message for each would cost more than most verdicts."""
MAX_PARTS = 16
"""Parts of a reward that a verdict may have."""
MAX_EXTRACTED = 1_000
"""Characters of an extracted answer that are kept."""
LOAD_S = 60.0
"""Seconds that a task's `load` may take on top of the deadline of a response."""
PROGRESS = struct.Struct("dq")
"""Memory shared with the pool: the monotonic time at which an item was begun, and its index.

They are written in this order and read in the other. A reader in between then sees the earlier
index with the later time, and grants the item more time, never less."""

_STATUS = re.compile(r"[a-z][a-z_]{0,39}")
LOST_STATUSES = frozenset(("crashed", "timeout", "verifier_lost"))
"""Statuses of responses for which the task gave no verdict."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    descriptor, progress, parent, memory_bytes = map(int, sys.argv[1:5])
    hidden, *readable = sys.argv[5:]
    _kill_with(parent)
    # Responses may crash this process on purpose; core dumps would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = _Worker(Connection(descriptor), mmap.mmap(progress, PROGRESS.size), memory_bytes)
    worker.send(confine(readable, hidden))
    try:
        worker.serve()
    except EOFError:
        return  # the pool has closed the connection


class _Worker:
    def __init__(self, connection: Connection, progress: mmap.mmap, memory_bytes: int) -> None:
        self._connection, self._progress = connection, progress
        self._memory_bytes = memory_bytes
        self._task: Task | None = None
        self._load: Callable[[Mapping[str, Any]], None] | None = None
        self._first_size = 0

    def send(self, message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def serve(self) -> None:
        """Handles messages until the pool closes the connection, which raises `EOFError`."""
        while True:
            kind, *arguments = pickle.loads(self._connection.recv_bytes())
            if kind == "prepare":
                self.send(self._prepare(*arguments))
            else:
                self._score(*arguments)

    def _prepare(self, name: str, options: dict[str, Any]) -> str | list[str]:
        """Makes a task; returns the files of its code, or why it cannot be made."""
        # The memory that a task needs itself, such as its imports, does not count as a response's.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        try:
            task = _make_task(name, options)
            warm_up = getattr(task, "warm_up", None)
            if warm_up is not None:
                warm_up()
        except (TaskError, ValueError) as error:
            return _clean(_message(error))
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; the pool reports it
            text = f"task {name} does not start: {type(error).__name__}: {_message(error)}"
            return _clean(text)
        self._task, self._load = task, getattr(task, "load", None)
        # Imported modules never become garbage; the collector need not scan SymPy's objects.
        gc.freeze()
        self._first_size = self._first_size or _address_space()
        return _code_of(task)

    def _score(self, work: Sequence[Work]) -> None:
        assert self._task is not None
        # Relative to the present size: memory that earlier items left behind must not count.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + self._memory_bytes, hard))
        results: list[Result] = []
        flushed = time.monotonic()
        loaded: Mapping[str, Any] | None = None
        for index, (payload, response) in enumerate(work):
            now = time.monotonic()
            if now - flushed > FLUSH_S:
                self.send([results, False, None])
                results, flushed = [], now
            try:
                if self._load is not None and payload is not loaded:
                    # The time limit of an item is measured from the time in the shared memory.
                    PROGRESS.pack_into(self._progress, 0, now + LOAD_S, index)
                    self._load(payload)
                    loaded, now = payload, time.monotonic()
                    PROGRESS.pack_into(self._progress, 0, now, index)
                    # A message makes the pool read the time of the item's start again.
                    self.send([results, False, None])
                    results, flushed = [], now
                else:
                    PROGRESS.pack_into(self._progress, 0, now, index)
                results.append(score(self._task, payload, response))
            except PayloadError as error:
                self.send([[], False, _clean(_message(error))])
                return
            except MemoryError:
                # Code that ran out of memory half-way may be broken: a new process goes on.
                self._retire([*results, failed("too_large")])
        if _address_space() > self._first_size + self._memory_bytes:
            self._retire(results)
        self.send([results, False, None])

    def _retire(self, results: list[Result]) -> None:
        self.send([results, True, None])
        os._exit(0)


def _make_task(name: str, options: dict[str, Any]) -> Task:
    """Returns the task that scores. Raises `TaskError` or `ValueError`, as a task's maker may."""
    if name != FUNCTION:
        return get_task(name, **options)
    from services.verifier.functions import RunnableFunctions

    return RunnableFunctions(**options)


def score(task: Task, payload: Mapping[str, Any], response: str) -> Result:
    """Returns the result of one response. Raises `MemoryError` and `PayloadError` only."""
    try:
        verdict = task.verify(payload, response)
        reward, status, answer = float(verdict.reward), str(verdict.status), verdict.answer
        parts = {str(name): float(value) for name, value in verdict.parts.items()}
        if not all(abs(value) <= MAX_REWARD for value in (reward, *parts.values())):
            raise ValueError(
                f"the reward is {reward}, with the parts {parts}; make all finite numbers of at "
                f"most {MAX_REWARD:.2g}"
            )
        if len(parts) > MAX_PARTS or not all(map(_STATUS.fullmatch, parts)):
            raise ValueError(
                f"the parts of the reward are {sorted(parts)!r:.200}; give at most {MAX_PARTS}, "
                "named with lower-case letters and _"
            )
        if status in LOST_STATUSES or not _STATUS.fullmatch(status):
            raise ValueError(
                f"the status is {status!r:.60}; use lower-case letters and _, and none of "
                f"{', '.join(sorted(LOST_STATUSES))}"
            )
        extracted = None if answer is None else _clean(str(answer)[:MAX_EXTRACTED])
        return reward, status, extracted, None, parts
    except (MemoryError, PayloadError):
        raise
    except BaseException as error:  # noqa: BLE001
        # Tasks must not raise, but a plug-in may (sys.exit() included), and a payload may lack what
        # the task needs. One such item must not cost the others their process.
        return failed("crashed", _clean(_describe(error)[:MAX_EXTRACTED]))


def _describe(error: BaseException) -> str:
    return _message(error, str if isinstance(error, RewardError) else describe_error)


def _message(error: BaseException, describe: Callable[[BaseException], str] = str) -> str:
    try:
        return describe(error)
    except MemoryError:
        raise
    except BaseException as second:  # noqa: BLE001
        # The message of an exception is code of the task's, too.
        return f"{type(error).__name__}, whose message raised {type(second).__name__}"


def _clean(text: str) -> str:
    """Returns a text that is Unicode: lone surrogates are no text that JSON or Arrow can hold."""
    return text.encode(errors="backslashreplace").decode()


def failed(status: str, error: str | None = None) -> Result:
    """Returns the result of a response for which the task gave no verdict."""
    return 0.0, status, None, error, {}


def _code_of(task: Task) -> list[str]:
    """Returns the files of the modules that the task's package has loaded."""
    package = type(task).__module__.partition(".")[0]
    files = (
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package
    )
    return sorted(filter(None, files))


def _address_space() -> int:
    """Returns the size of this process's address space in bytes."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _kill_with(parent: int) -> None:
    """Has the kernel kill this process when the pool's process dies, even while it hangs in C."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
