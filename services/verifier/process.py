"""The pool's handle on one worker process: starts, prepares, feeds and kills it."""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
import re
import signal
import site
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from bapo_core.errors import PayloadError, TaskError, TransientError
from bapo_core.outcomes import Cause
from bapo_core.reward_files import FUNCTION
from services.common.process import ChildProcess, python_command, without_secrets
from services.verifier.worker import PROGRESS, Result, Work

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Seconds for a process to start, and for a task to be made and warmed up. They do not count
against a response's deadline."""
_MESSAGE_TIMEOUT_S = 30
"""A process that stops in the middle of a message for this long counts as crashed."""
_LARGEST_MESSAGE = 256 << 20
_MESSAGE = TypeAdapter(
    tuple[list[Result], bool, str | None], config=ConfigDict(allow_inf_nan=False)
)
"""A message of results. What a process sends is checked, because the code of a task may have
written it."""
_POLL_S = 0.25
"""Longest single wait for results, so that a wait that took longer shows a pause of the machine."""
CODE_CHECK_S = 1.0
"""Seconds between two looks at whether the code of a task has changed."""
NOT_BEGUN = -1
"""The position of a process that has items and has not begun the first of them."""

_PUBLIC_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LANGUAGE|LC_\w+|LD_\w+|SSL_CERT_\w+|PYTHON\w*"
    r"|(OMP|MKL|KMP|OPENBLAS|NUMEXPR|MALLOC|TOKENIZERS)_\w+"
)
"""Variables that a worker inherits. Others may hold a secret under any name."""
_FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals that no fault of the process's own code raises."""
TaskKey = tuple[str, str]
"""(name, options as canonical JSON)."""


class TaskRefused(TaskError):
    """The task does not take these options, or its plug-in does not load."""


class WorkerLost(TransientError):
    """A worker process ended or hung while it started or prepared a task."""


class NoWorker(WorkerLost):
    """The system refused a worker process, for lack of memory, processes or descriptors."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker process may use."""

    memory_bytes: int
    """Memory that scoring one response may take."""
    readable: tuple[str, ...] = ()
    """Files and directories that tasks may read, besides their packages."""
    hidden: str = ""
    """Directory that tasks may not read, even if it is in a directory of the import path."""


class WorkerProcess:
    """A worker process: a fresh interpreter, not a fork, for the server has threads and secrets.

    `fate` is None while the process may be used; then it is "timeout" (killed for a missed
    deadline), "crashed", or "retired" (it exited by itself, to give its memory back).
    """

    def __init__(self, limits: WorkerLimits) -> None:
        """Starts the process. Raises `NoWorker` if the system refuses one."""
        self.fate: str | None = None
        self.prepared: TaskKey | None = None
        self.used = False
        """Whether it has got items to score."""
        self._bound_to: TaskKey | None = None
        """The task whose reward file it has run, after which it prepares no other task."""
        self._code = _modified(_package_directories())
        self._code_checked_at = time.monotonic()
        try:
            self._start(limits)
        except OSError as error:
            raise NoWorker(f"a verifier worker cannot be started: {error}") from error
        self.pid = self._process.pid

    def _start(self, limits: WorkerLimits) -> None:
        pool_end, worker_end = socket.socketpair()
        with tempfile.TemporaryFile() as progress, worker_end:
            limit = struct.pack("ll", _MESSAGE_TIMEOUT_S, 0)
            pool_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            pool_end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._connection = Connection(pool_end.detach())
            progress.truncate(PROGRESS.size)
            self._progress = mmap.mmap(progress.fileno(), PROGRESS.size)
            descriptors = (worker_end.fileno(), progress.fileno())
            numbers = (*descriptors, os.getpid(), limits.memory_bytes)
            arguments = (*map(str, numbers), limits.hidden, *limits.readable)
            self._process = ChildProcess(
                python_command("services.verifier.worker", *arguments),
                environment=_environment(),
                pass_fds=descriptors,
            )

    def wait_ready(self) -> None:
        """Waits until the process has started. Raises `WorkerLost` if it does not start."""
        for gap in self._receive_answer("start a verifier worker"):
            _report_gap(str(gap))

    def prepare(self, task: TaskKey) -> None:
        """Makes and warms up the task in the process.

        Raises `TaskRefused` if the task cannot be made, and `WorkerLost` if the process ends.
        """
        if self.prepared == task:
            return
        if task[0] == FUNCTION:
            self._bound_to = task
        self._send(("prepare", task[0], json.loads(task[1])))
        action = f"prepare task {task[0]}"
        answer = self._receive_answer(action)
        if isinstance(answer, str):
            raise TaskRefused(answer)
        if not isinstance(answer, list) or not all(isinstance(file, str) for file in answer):
            self.kill("crashed")  # The code of a task may have written to the connection itself.
            raise WorkerLost(f"cannot {action}: its process answered {answer!r:.80}")
        self._code |= _modified(answer)
        self.prepared = task

    def may_prepare(self, task: TaskKey) -> bool:
        """Whether the process may score with `task`.

        A process that has run the reward file of one run must not give the verdicts of another.
        """
        return self._bound_to in (None, task)

    def idle(self) -> bool:
        """Whether the process is ready for work, with the code that is installed now."""
        # An idle process is readable only after it has ended.
        if self.fate is not None or self._connection.poll():
            return False
        now = time.monotonic()
        if now - self._code_checked_at >= CODE_CHECK_S:
            if self._code != _modified(self._code):
                return False
            self._code_checked_at = now
        return True

    def dispatch(self, work: Sequence[Work]) -> None:
        """Sends items to score and starts the clock of the first one."""
        self.used = True
        PROGRESS.pack_into(self._progress, 0, time.monotonic(), NOT_BEGUN)
        self._send(("score", work))

    def receive(self, deadline_s: float) -> list[Result]:
        """Waits for the next results, and kills the process when an item misses its deadline.

        Time in which this process did not run either, because the machine was suspended or
        overloaded, does not count against the deadline. Returns nothing once there are no more
        results; `fate` then says why. Raises `PayloadError` for a payload that the task refuses;
        the process may be used again.
        """
        _, since = self.position()
        paused = 0.0
        while self.fate is None:
            begin = time.monotonic()
            remaining = since + deadline_s + paused - begin
            timeout = min(max(remaining, 0.0), _POLL_S)
            if self._connection.poll(timeout):
                return self._read()
            late = time.monotonic() - begin - timeout
            paused += late
            _, latest = self.position()
            if latest != since:
                # Another item has begun during the poll, and perhaps before the pause.
                since, paused = latest, late
            elif remaining <= 0:
                self.kill("timeout")
                if self.position()[1] != since:
                    self.fate = "retired"  # it began another item before it was killed
                # Results that were sent before the kill count.
                return self._read()
        return []

    def position(self) -> tuple[int, float]:
        """Returns (index of the item being scored or `NOT_BEGUN`, monotonic time of its start)."""
        _, index = PROGRESS.unpack_from(self._progress)
        since, _ = PROGRESS.unpack_from(self._progress)
        return index, since

    def kill(self, fate: str = "crashed") -> None:
        """Kills the process and everything it has started."""
        if self.fate is None:
            self.fate = fate
        self._process.kill_group()

    @property
    def loss(self) -> Cause:
        """How the process was lost, as far as the system tells, after `fate` is set."""
        if self.fate == "timeout":
            return Cause.DEADLINE
        return Cause.KILLED if self._process.signal in _FROM_OUTSIDE else Cause.ENDED

    def close(self) -> None:
        """Kills the process and closes its connection and shared memory."""
        self.kill()
        self._connection.close()
        self._progress.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self.kill("crashed")

    def _receive_answer(self, action: str) -> Any:
        """Returns the message that answers the start or a `prepare`. Raises `WorkerLost`."""
        try:
            if self.fate is None and self._connection.poll(START_TIMEOUT_S):
                return json.loads(self._connection.recv_bytes(_LARGEST_MESSAGE))
        except (EOFError, OSError, ValueError, RecursionError):
            pass
        self.kill("crashed")
        raise WorkerLost(
            f"cannot {action}: its process exited or did not answer within {START_TIMEOUT_S:.0f} s;"
            " the log above has its error output"
        )

    def _read(self) -> list[Result]:
        """Returns one message of results; nothing, with `fate` set, if the process has ended."""
        try:
            if self.fate is not None and not self._connection.poll():
                return []
            message = self._connection.recv_bytes(_LARGEST_MESSAGE)
            results, retiring, refusal = _MESSAGE.validate_json(message)
        except (EOFError, OSError, ValueError):
            self.kill("crashed")
            return []
        if refusal is not None:
            raise PayloadError(refusal)
        if retiring:
            self.kill("retired")
        return results


@cache
def _report_gap(gap: str) -> None:
    """Logs, once, what the kernel does not keep from graders."""
    log.warning("this kernel cannot keep graders from %s; see docs/verifier.md", gap)


def _environment() -> dict[str, str]:
    """Returns the import path, and those of this process's variables that hold no secret."""
    public = {
        name: value
        for name, value in without_secrets(os.environ).items()
        if _PUBLIC_VARIABLES.fullmatch(name)
    }
    return public | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _package_directories() -> list[str]:
    """Returns the directories that change whenever a package is installed or removed."""
    return [*site.getsitepackages(), site.getusersitepackages()]


def _modified(paths: Iterable[str]) -> dict[str, int | None]:
    """Returns when each file or directory was modified; None for one that does not exist."""
    times: dict[str, int | None] = {}
    for path in paths:
        try:
            times[path] = os.stat(path).st_mtime_ns
        except (OSError, ValueError):
            times[path] = None
    return times
