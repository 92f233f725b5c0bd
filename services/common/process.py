"""What every process of ours does at its edges: end with its parent, and say why it failed."""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from collections.abc import Callable

from services.common.errors import BapoError, PassingError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Linux: the kernel terminates this process when its parent dies, however it dies.

    Loaded above, at import: between fork and exec nothing may be imported.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


EXIT_AGAIN = 138
"""Kubernetes' operators start again what ends with 128 to 255, and give up on 1 to 127."""


def run_until_error(work: Callable[[], None]) -> None:
    """Runs a process's work; an error becomes a log line that its supervisor shows.

    Exits with 1 for what a restart does not mend, a wrong configuration for example, and with
    `EXIT_AGAIN` for what may have passed.
    """
    try:
        work()
    except PassingError as error:
        log.error("%s", error)
        sys.exit(EXIT_AGAIN)
    except BapoError as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception as error:
        log.exception("%s: %s", type(error).__name__, error)
        sys.exit(EXIT_AGAIN)


def stop_on_signals(words: str = "") -> None:
    """SIGTERM and SIGHUP unwind the process as Ctrl-C does, so that it stops what it started.

    words: for standard error, at once: stopping takes a while.
    """

    def stop(number: int, _: object) -> None:
        # A second signal must not interrupt the stopping.
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        if words:
            sys.stderr.write(f"{words}\n")
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, stop)
