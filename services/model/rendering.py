"""Bounds and explains what a model's chat template does; its author may be anybody.

transformers renders templates in a sandbox, which reaches no file and no module. It has no limit of
time: two nested loops may go on for days. Memory is not limited here, either: a template may build
a text of gigabytes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import TemplateError

from bapo_core.errors import BapoError

LONGEST_RENDERING_S = 10.0
"""Seconds of this process's CPU time that the rendering of one prompt may take; it takes some
hundred microseconds."""

_OF_TEMPLATES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
)
"""Errors of the expressions in a template."""


class _Endless(Exception):
    """The rendering has taken too long."""


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raises `BapoError` if the template refuses a prompt, or does not end in time.

    Python interrupts the main thread alone, in which the commands and the collector render prompts.
    In another thread there is no limit of time.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            with _interrupted_after(LONGEST_RENDERING_S):
                yield
        else:
            yield
    except _Endless as error:
        raise BapoError(
            "the model's chat template has not rendered a prompt within "
            f"{LONGEST_RENDERING_S:.0f} s of CPU time; choose another model, or repair the template"
        ) from error
    except TemplateError as error:
        raise BapoError(
            f"the model's chat template refuses a prompt: {error}; choose another model, or change "
            "how the task renders its prompts"
        ) from error
    except _OF_TEMPLATES as error:
        raise BapoError(
            f"the model's chat template cannot render a prompt ({type(error).__name__}: {error}); "
            "choose another model, or repair the template"
        ) from error


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise _Endless

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
