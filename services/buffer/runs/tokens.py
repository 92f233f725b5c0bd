"""API tokens: creates, lists and revokes them, and checks them on every request.

Only hashes of tokens are stored.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from fastapi import Depends, Request
from sqlalchemy import delete, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from services.buffer.api import wire
from services.buffer.service import Service
from services.buffer.storage.tables import ApiToken
from services.common.auth import FailureLimiter, bearer_token, hash_token
from services.common.guard import LARGEST_BODY, Guard
from services.common.problems import Problem, bad_request, not_found
from services.common.scopes import SCOPES, Scope, covers

CONFIGURED = "from the environment"
"""Name of the tokens that the service's environment holds."""
RUNS = "/v1/runs/"
"""Beginning of the paths that are about one run."""


@dataclass(frozen=True, slots=True)
class AcceptedToken:
    """The token of a request."""

    name: str
    scope: Scope
    run: str | None
    """Name of the only run that it is for; None for all runs."""


def accept_configured(session: Session, configured: Mapping[Scope, str]) -> None:
    """Accepts the tokens of the service's own environment, one for each of these scopes.

    They replace those that were configured before, which are refused from the commit on: a token
    that was rotated because it leaked must not stay valid.
    """
    hashes = {hash_token(token): scope for scope, token in configured.items()}
    session.execute(
        delete(ApiToken).where(
            ApiToken.name == CONFIGURED,
            tuple_(ApiToken.hash, ApiToken.scope).not_in(hashes.items()),
        )
    )
    for hashed, scope in hashes.items():
        session.execute(
            insert(ApiToken)
            .values(name=CONFIGURED, hash=hashed, scope=scope)
            .on_conflict_do_nothing(index_elements=["hash"])
        )


def create(session: Session, request: wire.TokenCreate) -> wire.TokenCreated:
    """Creates a token. The returned model is the only place that ever holds its secret.

    Raises a 400 `Problem` for the name of the configured tokens, and for an administrator of one
    run.
    """
    if request.name == CONFIGURED:
        raise bad_request(f"name: {CONFIGURED!r} names the service's own tokens; take another")
    if request.scope == "admin" and request.run is not None:
        raise bad_request(
            "run: a token of scope 'admin' is for all runs; take another scope, or leave run out"
        )
    token = f"bapo_{secrets.token_urlsafe(32)}"
    expires = None if request.days is None else datetime.now(UTC) + timedelta(days=request.days)
    row = ApiToken(
        name=request.name,
        scope=request.scope,
        run=request.run,
        expires_at=expires,
        hash=hash_token(token),
    )
    session.add(row)
    session.flush()
    session.refresh(row)
    return wire.TokenCreated(**view(row).model_dump(), token=token)


def list_tokens(session: Session) -> list[wire.TokenView]:
    """Returns all tokens ever created, oldest first."""
    return [view(row) for row in session.scalars(select(ApiToken).order_by(ApiToken.id))]


def revoke(session: Session, token_id: int) -> wire.TokenView:
    """Revokes a token from the commit on. Its row is kept as a record.

    Raises a 404 `Problem` for an unknown id.
    """
    row = session.get(ApiToken, token_id)
    if row is None:
        raise not_found(f"token {token_id}; `bapo token list` lists them")
    if row.revoked_at is None:
        row.revoked_at = datetime.now(UTC)
    return view(row)


def view(row: ApiToken) -> wire.TokenView:
    return wire.TokenView.model_validate(
        {name: getattr(row, name) for name in wire.TokenView.model_fields}
    )


def delete_bound(session: Session, run: str) -> None:
    """Deletes the tokens of a run, which another run of its name must not inherit."""
    session.execute(delete(ApiToken).where(ApiToken.run == run))


class ScopeGuard(Guard):
    """Admits tokens of certain scopes, those that are bound to a run only for their run.

    It answers 401 for a token that is not valid, 403 for one of another scope or run, and 429 after
    too many failures.
    """

    def __init__(self, permitted: tuple[Scope, ...], of_no_run: bool, largest_body: int) -> None:
        super().__init__(largest_body)
        self.permitted, self._of_no_run = permitted, of_no_run

    async def admit(self, request: Request) -> None:
        token = await run_in_threadpool(_token_of, request)
        if token is None:
            failures: FailureLimiter = request.app.state.token_failures
            failures.record(request)
            raise Problem(
                401, "Unauthorized", "this token is not known here, was revoked, or has expired"
            )
        if not covers(token.scope, self.permitted):
            needed = " or ".join(map(repr, self.permitted))
            raise Problem(
                403, "Forbidden", f"this needs scope {needed}, the token has {token.scope!r}"
            )
        if token.run is not None:
            self._check_run(request, token.run)
        request.state.token = token

    def openapi(self) -> dict[str, Any]:
        return {"x-scopes": [scope for scope in SCOPES if covers(scope, self.permitted)]}

    def _check_run(self, request: Request, run: str) -> None:
        """Raises a 403 `Problem` unless the request is about this run."""
        path = request.scope["path"].removeprefix(request.scope["root_path"])
        if path.startswith(RUNS):
            permitted = request.path_params.get("name") == run
        else:
            permitted = self._of_no_run
        if not permitted:
            raise Problem(403, "Forbidden", f"this token is for run {run!r} alone")


def permit(*scopes: Scope, of_no_run: bool = False, largest_body: int = LARGEST_BODY) -> list[Any]:
    """Returns the dependencies of a route, which state who may call it.

    scopes: scopes that may call it, besides `admin`, and those that include them. of_no_run:
    whether a token that is bound to a run may call it, though the route is not below
    `/v1/runs/{name}`.
    """
    return [Depends(ScopeGuard(scopes, of_no_run, largest_body))]


def _token_of(request: Request) -> AcceptedToken | None:
    """Returns the request's token; None if it is unknown, revoked or has expired."""
    hashed = hash_token(bearer_token(request))
    service: Service = request.app.state.service
    with service.sessions.begin() as session:
        row = session.scalar(select(ApiToken).where(ApiToken.hash == hashed))
        if row is None or row.revoked_at is not None:
            return None
        if not hmac.compare_digest(row.hash, hashed):
            return None
        now = datetime.now(UTC)
        if row.expires_at is not None and row.expires_at <= now:
            return None
        # A resolution of a minute spares a write for every request.
        if row.last_used_at is None or now - row.last_used_at > timedelta(minutes=1):
            row.last_used_at = now
        return AcceptedToken(row.name, cast(Scope, row.scope), row.run)
