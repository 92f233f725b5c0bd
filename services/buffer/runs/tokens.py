"""API tokens: creates, lists and revokes them, and checks them on every request.

Only hashes of tokens are stored.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Depends, Request
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from services.buffer.api import wire
from services.buffer.service import Service
from services.buffer.storage.tables import ApiToken
from services.common.auth import bearer_token, covers, hash_token
from services.common.guard import LARGEST_BODY, Guard
from services.common.problems import Problem, bad_request, not_found
from services.common.scopes import Scope

FAILURES_PER_MINUTE = 30
"""Requests with unknown tokens from one address before it gets 429."""
CONFIGURED = "from the environment"
"""Name of the token that the service's environment holds."""
MAX_CLIENTS = 10_000
"""Addresses whose failures are kept; the oldest is dropped beyond that."""


def accept_configured(session: Session, token: str) -> None:
    """Accepts the token of the service's own environment, with the scope `admin`.

    It replaces the one that was configured before, which is refused from the commit on: a token
    that was rotated because it leaked must not stay valid.
    """
    hashed = hash_token(token)
    session.execute(delete(ApiToken).where(ApiToken.name == CONFIGURED, ApiToken.hash != hashed))
    session.execute(
        insert(ApiToken)
        .values(name=CONFIGURED, hash=hashed, scope="admin")
        .on_conflict_do_nothing(index_elements=["hash"])
    )


def create(session: Session, request: wire.TokenCreate) -> wire.TokenCreated:
    """Creates a token. The returned model is the only place that ever holds its secret.

    Raises a 400 `Problem` for the name of the configured token.
    """
    if request.name == CONFIGURED:
        raise bad_request(f"name: {CONFIGURED!r} names the service's own token; take another")
    token = f"bapo_{secrets.token_urlsafe(32)}"
    row = ApiToken(name=request.name, scope=request.scope, hash=hash_token(token))
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


class FailureLimiter:
    """Counts requests with unknown tokens by client address. A valid token always passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}

    def record(self, client: str) -> None:
        """Records a failure. Raises a 429 `Problem` after too many within a minute."""
        now = time.monotonic()
        with self._lock:
            if len(self._times) >= MAX_CLIENTS:
                self._times.pop(next(iter(self._times)))
            times = self._times.setdefault(client, deque(maxlen=FAILURES_PER_MINUTE))
            limited = len(times) == FAILURES_PER_MINUTE and now - times[0] < 60
            wait = 60 - (now - times[0]) if limited else 0.0
            times.append(now)
        if limited:
            raise Problem(
                429,
                "Too many failures",
                f"more than {FAILURES_PER_MINUTE} requests with unknown tokens came from this "
                "address within a minute; wait, and use a valid token",
                headers={"Retry-After": str(int(wait) + 1)},
            )


class RequireScope(Guard):
    """Admits only tokens whose scope includes `required`.

    It answers 401 for an unknown token, 403 for a smaller scope, and 429 after too many failures.
    """

    def __init__(self, required: Scope, largest_body: int) -> None:
        super().__init__(largest_body)
        self.required = required

    async def admit(self, request: Request) -> None:
        token = await run_in_threadpool(_token_of, request)
        if token is None:
            failures: FailureLimiter = request.app.state.token_failures
            failures.record(request.client.host if request.client else "")
            raise Problem(401, "Unauthorized", "this token is not known here, or was revoked")
        request.state.token_name, scope = token
        if not covers(scope, self.required):
            raise Problem(
                403, "Forbidden", f"this needs scope {self.required!r}, the token has {scope!r}"
            )
        request.state.scope = scope


def permit(required: Scope, largest_body: int = LARGEST_BODY) -> list[Any]:
    """Returns the dependencies of a route, which state the scope that it requires."""
    return [Depends(RequireScope(required, largest_body))]


def _token_of(request: Request) -> tuple[str, str] | None:
    """Returns name and scope of the request's token; None if it is unknown or revoked."""
    hashed = hash_token(bearer_token(request))
    service: Service = request.app.state.service
    with service.sessions.begin() as session:
        row = session.scalar(select(ApiToken).where(ApiToken.hash == hashed))
        if row is None or row.revoked_at is not None:
            return None
        if not hmac.compare_digest(row.hash, hashed):
            return None
        now = datetime.now(UTC)
        # A resolution of a minute spares a write for every request.
        if row.last_used_at is None or now - row.last_used_at > timedelta(minutes=1):
            row.last_used_at = now
        return row.name, row.scope
