"""Child processes, exit codes and signals of all processes."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import pwd
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from bapo_core.errors import BapoError, TransientError
from services.common.proxies import bypass_proxies

log = logging.getLogger(__name__)

STOP_WITHIN_S = 15.0
"""Seconds after which a child that was asked to stop is killed, unless its owner says otherwise."""
EXIT_RETRYABLE = 138
"""Exit code of a process that a restart may fix.

Kubernetes' operators restart what exits with 128 to 255, and give up on 1 to 127.
"""
_POSTPONE_S = 0.01
"""Seconds until a signal that arrived where nothing may unwind is sent again."""
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_SECRET_NAME = re.compile(
    r"BAPO_|(^|_)(TOKENS?|SECRETS?|KEYS?|CREDENTIALS?|AUTH|PAT|APIKEY)(_|$)|PASSW(OR)?D|_PWD$",
    re.IGNORECASE,
)
_POSTGRES_ERROR = re.compile(r" (FATAL|PANIC):  ")
_POSTGRES_MORE = re.compile(r" (HINT|DETAIL):  ")
_POSTGRES_PREFIX = re.compile(r"^.*? (?=[A-Z]+:  )")
_CREDENTIALS_IN_ADDRESS = re.compile(r"://[^/\s@]+@")
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(signal_number: signal.Signals = signal.SIGTERM) -> None:
    """Makes the kernel send this process a signal when its parent dies, however it dies (Linux).

    libc is loaded at import, because nothing may be imported between fork and exec.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)


def hide_memory() -> None:
    """Closes this process's environment and memory to others of the same user (Linux).

    The kernel then shows `/proc/PID/environ` and `/proc/PID/mem` to root alone. What this process
    starts is not affected.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that are no secret by their name, nor hold a password.

    A variable is a secret if it is bapo's or if a part of its name says so, as in `HF_TOKEN`,
    `AWS_SECRET_ACCESS_KEY` and `PGPASSWORD`, and holds a password if it is an address with one.
    """
    return {
        name: value
        for name, value in variables.items()
        if not _SECRET_NAME.search(name) and not _CREDENTIALS_IN_ADDRESS.search(value)
    }


def python_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of this project's modules in this interpreter.

    `-P` keeps the working directory off the import path: a `services` package in it must not
    shadow ours.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


class ChildProcess:
    """A child process that dies with its parent, and is stopped by a signal or else by force.

    It leads a session of its own, so that Ctrl-C reaches only the parent, which stops its children
    in order, and so that `kill_group` reaches whatever the child has started. Start it from the
    main thread: the kernel ends it when the thread that started it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        append_log: bool = False,
        working_directory: Path | None = None,
        user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts `command`.

        environment: the whole environment of the child; this process's own when None.
        log: file for standard output and standard error; they are inherited when None.
        user: name of the user to run as, without this process's groups; needs root.
        stop_signal: what `stop` sends, and the kernel when this process dies.
        """
        self._stop_signal = stop_signal
        self.log = log
        output: IO[bytes] | None = None if log is None else log.open("ab" if append_log else "wb")
        variables = os.environ if environment is None else environment
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                # What the child starts in turn ignores the working directory, too.
                env={**variables, "PYTHONSAFEPATH": "1"},
                cwd=working_directory,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, stop_signal),
                pass_fds=pass_fds,
                **as_user(user),
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for the signal that killed it; None while the child runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout_s)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child alone."""
        self._process.send_signal(number)

    def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """Asks the child to stop, and kills it when it has not within `within_s` seconds."""
        if self._process.poll() is None:
            self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill_group(self) -> None:
        """Kills the child and whatever it has started, and waits for the child's end."""
        # Once the child has been waited for, its number may belong to another process.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def signal(self) -> int | None:
        """The signal that ended the child; None if it runs or has exited."""
        code = self._process.returncode
        return -code if code is not None and code < 0 else None

    def last_error(self) -> str:
        """Returns the last error in the child's log, or else its last line, and the log's path."""
        assert self.log is not None, "this child has no log"
        return last_error(self.log)


def reap_orphans(*children: int) -> None:
    """Waits for the processes that have ended and whose parents have left them to this one.

    The first process of a container inherits them, and each would stay in the table of processes
    until the container ends.

    children: ids of this process's own children, for which others wait.
    """
    ended = partial(os.waitid, os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    with suppress(ChildProcessError):  # there are none
        while (process := ended()) is not None and process.si_pid not in children:
            os.waitpid(process.si_pid, 0)


def last_error(log: Path) -> str:
    """Returns the last error of a log, or else its last line, with the path of the log to read."""
    text = log.read_text(errors="replace") if log.exists() else ""
    error = find_error(text) or "it wrote nothing"
    # The error of a supervisor names the log of the child that failed, which says more.
    return error if "(log: " in error else f"{error} (log: {log})"


def find_error(text: str) -> str:
    """Returns the message of the last error in the text of a log, or else its last line.

    Lines that are JSON are those of `services.common.logs`; torchrun's own follow them. The last
    error of Postgres is followed by its hint.
    """
    lines = text.strip().splitlines()
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") == "error":
            return str(entry["message"])
    for number, line in reversed(list(enumerate(lines))):
        if _POSTGRES_ERROR.search(line):
            hints = filter(_POSTGRES_MORE.search, lines[number + 1 :])
            reasons = [line, *hints]
            return "; ".join(_POSTGRES_PREFIX.sub("", reason) for reason in reasons)
    return lines[-1] if lines else ""


def describe_exit(code: int) -> str:
    """Returns how a process ended, in words: "failed (exit 1)", "was killed by SIGKILL"."""
    return f"failed (exit {code})" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def as_user(user: str | None) -> dict[str, Any]:
    """Returns arguments of `subprocess` that run a child as `user`, without our groups."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def run_until_error(work: Callable[[], None]) -> None:
    """Runs a process's work, and logs the error that ends it, for its supervisor to show.

    Exits with 1 for a `BapoError`, which a restart does not fix (a wrong configuration, an unknown
    task), and with `EXIT_RETRYABLE` for a `TransientError` and for any unforeseen exception.
    """
    bypass_proxies()
    try:
        work()
    except TransientError as error:
        log.error("%s", error)
        sys.exit(EXIT_RETRYABLE)
    except BapoError as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception as error:
        log.exception("%s: %s", type(error).__name__, error)
        sys.exit(EXIT_RETRYABLE)


def _holds_http_lock(frame: FrameType | None) -> bool:
    """Returns whether a lock of the HTTP connections is being taken or released at `frame`.

    An exception there would leave it taken, and httpcore takes it again while the request unwinds:
    a wait without end. The frames that called `frame` count too: it may be one of a former signal's
    handler, which the next signal has interrupted.
    """
    while frame is not None:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "httpcore._synchronization" and function in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


def stop_on_signals(message: str = "") -> None:
    """Makes SIGTERM and SIGHUP unwind the process as Ctrl-C does, so that it stops its children.

    A signal that arrives while a lock of the HTTP connections is taken or released is postponed.

    message: printed on standard error at once, because stopping takes a while.
    """
    is_postponed = is_stopping = False  # Not events: a signal may arrive while their lock is held.

    def send_again(number: int) -> None:
        # One signal is not enough: it can arrive after Python's last check for signals and before
        # the main thread blocks in a system call, and is handled only when that call returns.
        time.sleep(_POSTPONE_S)
        while not is_stopping:
            os.kill(os.getpid(), number)
            time.sleep(_POSTPONE_S)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_postponed, is_stopping
        if _holds_http_lock(frame):
            if not is_postponed:
                is_postponed = True
                threading.Thread(target=send_again, args=(number,), daemon=True).start()
            return
        is_stopping = True
        # A second signal must not interrupt the stopping.
        for stopping in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(stopping, signal.SIG_IGN)
        if message:
            sys.stderr.write(f"{message}\n")
        raise SystemExit(128 + number)

    for stopping in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(stopping, stop)
