"""Errors of routes as problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bapo_core.errors import BapoError
from services.common.errors import UNFORESEEN
from services.common.redaction import redact


class Problem(Exception):
    """An error of a route, sent as `application/problem+json`.

    status: HTTP status. title: short name of the kind of error. detail: what is wrong, where, and
    the remedy. kind: URI of the kind, for clients that handle it.
    """

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
    """Returns a 404 whose detail is "there is no {what}"."""
    return Problem(404, "Not found", f"there is no {what}")


def conflict(detail: str, kind: str = "about:blank") -> Problem:
    """Returns a 409: the request contradicts the current state."""
    return Problem(409, "Conflict", detail, kind)


def bad_request(detail: str) -> Problem:
    """Returns a 400: the request is well-formed, but wrong for this run."""
    return Problem(400, "Bad request", detail)


def problem_response(
    status: int,
    title: str,
    detail: str,
    kind: str = "about:blank",
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Returns a response with problem details (RFC 9457), without secrets."""
    body = {"type": kind, "title": title, "status": status, "detail": redact(detail)}
    return JSONResponse(
        body, status_code=status, media_type="application/problem+json", headers=headers
    )


def unavailable(detail: str) -> JSONResponse:
    """Returns a 503: a dependency does not answer at present; the call should be repeated."""
    return problem_response(503, "Unavailable", detail, headers={"Retry-After": "1"})


def install_problem_handlers(app: FastAPI, rules: Mapping[str, str] | None = None) -> None:
    """Makes `app` answer every error with problem details.

    rules: pattern of a field -> what it demands, in words.
    """
    in_words = rules or {}

    def describe(problem: Mapping[str, Any]) -> str:
        where = ".".join(map(str, problem["loc"]))
        rule = in_words.get(problem.get("ctx", {}).get("pattern"))
        if problem["type"] == "string_pattern_mismatch" and rule:
            return f"{where} is {problem['input'][:80]!r}: {rule}"
        return f"{where}: {problem['msg']}"

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> JSONResponse:
        return problem_response(error.status, error.title, error.detail, error.kind, error.headers)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == 404:
            path = request.url.path
            detail = f"there is no route {path}; /openapi.json lists all routes"
            if path.endswith("/"):
                detail += ", and none but / ends with a slash"
        return problem_response(
            error.status_code, HTTPStatus(error.status_code).phrase, detail, headers=error.headers
        )

    @app.exception_handler(BapoError)
    async def _failed(_: Request, error: BapoError) -> JSONResponse:
        return problem_response(500, "Failed", str(error))

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        detail = (
            f"{request.method} {request.url.path} met an unforeseen {type(error).__name__}; the "
            "log of the service has its traceback"
        )
        return problem_response(500, "Unforeseen error", detail, UNFORESEEN)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = "; ".join(map(describe, error.errors()))
        return problem_response(422, "Invalid request", problems)
