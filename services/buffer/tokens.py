"""API tokens: made, listed, revoked, and checked on every request. Only hashes are kept."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import deque
from datetime import UTC, datetime, timedelta

from fastapi import Depends, Request
from fastapi.params import Depends as DependsParameter
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.buffer.api import wire
from services.buffer.service import Service
from services.buffer.tables import ApiToken
from services.common.auth import bearer_token, covers, hash_token
from services.common.errors import Problem, not_found

FAILURES_PER_MINUTE = 30
CLIENTS_REMEMBERED = 10_000


def create(session: Session, request: wire.TokenCreate) -> wire.TokenCreated:
    """A new token. The answer is the only place where it is ever shown."""
    token = f"bapo_{secrets.token_urlsafe(32)}"
    row = ApiToken(name=request.name, scope=request.scope, hash=hash_token(token))
    session.add(row)
    session.flush()
    session.refresh(row)
    return wire.TokenCreated(**view(row).model_dump(), token=token)


def listing(session: Session) -> list[wire.TokenView]:
    return [view(row) for row in session.scalars(select(ApiToken).order_by(ApiToken.id))]


def revoke(session: Session, token_id: int) -> wire.TokenView:
    """From the commit on, the token is not known any more. Its row stays, for the record."""
    row = session.get(ApiToken, token_id)
    if row is None:
        raise not_found(f"token {token_id}; GET /v1/tokens lists them")
    if row.revoked_at is None:
        row.revoked_at = datetime.now(UTC)
    return view(row)


def view(row: ApiToken) -> wire.TokenView:
    return wire.TokenView.model_validate(
        {name: getattr(row, name) for name in wire.TokenView.model_fields}
    )


class Failures:
    """Failed attempts by client in the last minute. A good token always passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}

    def record(self, client: str) -> None:
        """Notes a failure; 429 when there were too many."""
        now = time.monotonic()
        with self._lock:
            if len(self._times) >= CLIENTS_REMEMBERED:
                self._times.pop(next(iter(self._times)))
            times = self._times.setdefault(client, deque(maxlen=FAILURES_PER_MINUTE))
            full = len(times) == FAILURES_PER_MINUTE and now - times[0] < 60
            wait = 60 - (now - times[0]) if full else 0.0
            times.append(now)
        if full:
            raise Problem(
                429,
                "Too many failures",
                "too many requests with bad tokens came from this address; wait and use a good one",
                headers={"Retry-After": str(int(wait) + 1)},
            )


class Guard:
    """Makes the dependency that lets only tokens of a scope through."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._failures = Failures()

    def __call__(self, wanted: wire.Scope) -> list[DependsParameter]:
        def check(request: Request) -> None:
            scope = self._scope_of(request)
            if scope is None:
                self._failures.record(request.client.host if request.client else "")
                raise Problem(401, "Unauthorized", "this token is not known here, or was revoked")
            if not covers(scope, wanted):
                raise Problem(
                    403, "Forbidden", f"this needs scope {wanted!r}, the token has {scope!r}"
                )
            request.state.scope = scope

        return [Depends(check)]

    def _scope_of(self, request: Request) -> str | None:
        hashed = hash_token(bearer_token(request))
        with self._service.sessions.begin() as session:
            row = session.scalar(select(ApiToken).where(ApiToken.hash == hashed))
            if row is None or row.revoked_at is not None:
                return None
            if not hmac.compare_digest(row.hash, hashed):
                return None
            now = datetime.now(UTC)
            # To the minute is enough, and spares a write for every request.
            if row.last_used_at is None or now - row.last_used_at > timedelta(minutes=1):
                row.last_used_at = now
            return row.scope
