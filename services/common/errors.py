"""Errors of calls to services, and what libraries say of theirs."""

from __future__ import annotations

from bapo_core.errors import BapoError, TransientError


def first_line(error: Exception) -> str:
    """Returns the first line of a library's message that is not blank, or else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))


class ServiceCallError(BapoError):
    """A call to a service failed."""


class ServiceUnavailable(ServiceCallError, TransientError):
    """A service has not answered for as long as its client repeats a call."""


class ServiceError(ServiceCallError):
    """A service answered with an error. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Superseded(ServiceError):
    """A newer attempt of the run has taken over, or the run was stopped; the process must end."""
