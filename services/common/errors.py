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
    """A service answered with an error.

    status: the HTTP status. detail: what the service said, without the request.
    """

    def __init__(self, status: int, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.status, self.detail = status, detail or message


class Superseded(ServiceError):
    """A newer attempt of the run has taken over, or the run was stopped; the process must end."""
