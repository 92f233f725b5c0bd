"""What every process of ours does at its edges: end with its parent, and say why it failed."""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from collections.abc import Callable

from services.common.errors import BapoError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Linux: the kernel terminates this process when its parent dies, however it dies.

    Loaded above, at import: between fork and exec nothing may be imported.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_until_error(work: Callable[[], None]) -> None:
    """Runs a process's work; an error becomes a log line that its supervisor shows, and exit 1."""
    try:
        work()
    except BapoError as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception as error:
        log.exception("%s: %s", type(error).__name__, error)
        sys.exit(1)
