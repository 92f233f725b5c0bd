"""Errors of calls to services, and what libraries say of theirs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo_core.errors import BapoError, TransientError

UNFORESEEN = "urn:bapo:unforeseen"
"""Kind of the problem details of an exception that a service did not foresee."""


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's message that is not blank, or else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))


def describe_error(error: BaseException) -> str:
    """Returns the kind of an error, its message, and the line that raised it unless it is one of
    the function that calls this."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


@contextmanager
def task_errors(task: str, method: str, *, refusal: type[Exception] = BapoError) -> Iterator[None]:
    """Turns what a task's method raises by mistake into a `BapoError` that names both.

    refusal: what the method raises on purpose, which passes as `BapoError` does.
    """
    try:
        yield
    except (BapoError, refusal):
        raise
    except Exception as error:
        raise BapoError(f"task {task}: {method} raised {describe_error(error)}") from error


class ServiceCallError(BapoError):
    """A call to a service failed."""


class ServiceUnavailable(ServiceCallError, TransientError):
    """A service has not answered for as long as its client repeats a call."""


class ServiceError(ServiceCallError):
    """A service answered with an error.

    status: the HTTP status. detail: what the service said, without the request.
    """

    def __init__(self, status: int, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.status, self.detail = status, detail or message


class Superseded(ServiceError):
    """A newer attempt of the run has taken over, or the run was stopped; the process must end."""
