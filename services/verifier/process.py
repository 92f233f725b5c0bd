"""One worker process as the pool sees it: start, prepare, score, kill."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from pydantic_core import from_json

from bapo_core.errors import BapoError
from services.common.process import python_command
from services.verifier.worker import PROGRESS, Result, Work

START_WITHIN_S = 60.0
"""For a process to start, and for a task to be made and warmed up. No response pays for it."""
_STUCK_S = 30
"""A process that stops in the middle of a message for so long is broken."""
_LARGEST_MESSAGE = 256 << 20
UNBEGUN = -1
"""The position of a process that has items and has not turned to the first of them."""

TaskKey = tuple[str, str]
"""(name, options as canonical JSON)."""


class TaskRefused(BapoError):
    """The task does not take these options, or its plug-in does not load."""


class WorkerProcess:
    """A fresh interpreter, not a fork: the server has threads, and secrets in its memory.

    `fate` is None while the process may be used; then one of "timeout" (killed), "crashed" and
    "retired" (it ended itself in good order).
    """

    def __init__(self, memory_bytes: int) -> None:
        self.fate: str | None = None
        self.prepared: TaskKey | None = None
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", _STUCK_S, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._connection = Connection(ours.detach())
        with tempfile.TemporaryFile() as progress, theirs:
            progress.truncate(PROGRESS.size)
            self._progress = mmap.mmap(progress.fileno(), PROGRESS.size)
            descriptors = (theirs.fileno(), progress.fileno())
            arguments = (*descriptors, os.getpid(), memory_bytes)
            self._process = subprocess.Popen(
                python_command("services.verifier.worker", *map(str, arguments)),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                # Its own group: Ctrl-C reaches only us, and what it starts is killed with it.
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Until it has started. Raises `BapoError` if it does not."""
        self._answer("start a verifier worker")

    def prepare(self, task: TaskKey) -> None:
        """Makes the task there. Raises `TaskRefused` if it is not to be had."""
        if self.prepared == task:
            return
        self._send(("prepare", task[0], json.loads(task[1])))
        refusal = self._answer(f"prepare task {task[0]}")
        if refusal is not None:
            raise TaskRefused(str(refusal))
        self.prepared = task

    def idle(self) -> bool:
        """Whether it is fit for work; an idle process says nothing unless it has ended."""
        return self.fate is None and not self._connection.poll()

    def dispatch(self, work: Sequence[Work]) -> None:
        """Gives it items to score; the clock of the first one starts."""
        PROGRESS.pack_into(self._progress, 0, time.monotonic(), UNBEGUN)
        self._send(("score", work))

    def receive(self, deadline_s: float) -> list[Result]:
        """The next results. When none are to come any more, `fate` says why."""
        while self.fate is None:
            _, since = self.position()
            left = since + deadline_s - time.monotonic()
            if self._connection.poll(max(left, 0.0)):
                return self._read()
            # Another item may have begun while we waited; only the same one can be overdue.
            if left <= 0 and self.position()[1] == since:
                self.kill("timeout")
                if self.position()[1] != since:
                    self.fate = "retired"  # it went on at the last moment; nothing is overdue
                # What was ready before the kill counts.
                return self._read()
        return []

    def position(self) -> tuple[int, float]:
        """(index of the item under way, or `UNBEGUN`; since when)."""
        _, index = PROGRESS.unpack_from(self._progress)
        since, _ = PROGRESS.unpack_from(self._progress)
        return index, since

    def kill(self, fate: str = "crashed") -> None:
        """Ends it and whatever it has started."""
        if self.fate is None:
            self.fate = fate
        # Once it has been waited for, its number may be somebody else's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Kills it and frees what we hold of it."""
        self.kill()
        self._connection.close()
        self._progress.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self.kill("crashed")

    def _answer(self, doing: str) -> Any:
        """The one message that answers `start` or `prepare`."""
        try:
            if self.fate is None and self._connection.poll(START_WITHIN_S):
                return json.loads(self._connection.recv_bytes(_LARGEST_MESSAGE))
        except (EOFError, OSError):
            pass
        self.kill("crashed")
        raise BapoError(f"cannot {doing}: its process ended or hangs; see the log above")

    def _read(self) -> list[Result]:
        """A message of results; none, and a fate, if the process has ended."""
        try:
            if self.fate is not None and not self._connection.poll():
                return []
            results, retiring = from_json(self._connection.recv_bytes(_LARGEST_MESSAGE))
        except (EOFError, OSError, ValueError, TypeError):
            self.kill("crashed")
            return []
        if retiring:
            self.kill("retired")
        return list(results)


def _environment() -> dict[str, str]:
    """Ours without BAPO_ variables, which hold secrets; imports resolve as they do here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BAPO_")}
    return kept | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
