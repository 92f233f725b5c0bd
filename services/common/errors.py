"""Errors that a person can act on, and their form on the wire (RFC 9457 problem details)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bapo_core.errors import BapoError, TransientError


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
    """409: a newer attempt of the run has taken over; this process must stop."""


class Problem(Exception):
    """What a route raises; becomes an `application/problem+json` answer."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        kind: str = "about:blank",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail, self.kind = status, title, detail, kind
        self.headers = headers


def not_found(what: str) -> Problem:
    return Problem(404, "Not found", f"there is no {what}")


def conflict(detail: str, kind: str = "about:blank") -> Problem:
    return Problem(409, "Conflict", detail, kind)


def bad_request(detail: str) -> Problem:
    return Problem(400, "Bad request", detail)


def problem_response(
    status: int,
    title: str,
    detail: str,
    kind: str = "about:blank",
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    body = {"type": kind, "title": title, "status": status, "detail": detail}
    return JSONResponse(
        body, status_code=status, media_type="application/problem+json", headers=headers
    )


def unavailable(detail: str) -> JSONResponse:
    """503: something that the request needs is away for the moment; the same call may succeed."""
    return problem_response(503, "Unavailable", detail, headers={"Retry-After": "1"})


def install_problem_handlers(app: FastAPI) -> None:
    """Every error of `app` leaves as problem details."""

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> JSONResponse:
        return problem_response(error.status, error.title, error.detail, error.kind, error.headers)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"there is no {request.url.path} here; /docs lists what there is"
        return problem_response(
            error.status_code, HTTPStatus(error.status_code).phrase, detail, headers=error.headers
        )

    @app.exception_handler(BapoError)
    async def _failed(_: Request, error: BapoError) -> JSONResponse:
        return problem_response(500, "Failed", str(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        parts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        return problem_response(422, "Invalid request", "; ".join(parts))
