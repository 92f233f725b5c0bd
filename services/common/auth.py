"""Bearer tokens with scopes. Only hashes are stored or compared."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections import deque

from fastapi import Request

from services.common.guard import LARGEST_BODY, Guard
from services.common.problems import Problem

FAILURES_PER_MINUTE = 30
"""Requests with unknown tokens from one address before it gets 429."""
MAX_CLIENTS = 10_000
"""Addresses whose failures are kept; the oldest is dropped beyond that."""


def hash_token(token: str) -> str:
    """Returns the SHA-256 of a token, which is what is stored and compared."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_token(request: Request) -> str:
    """Returns the bearer token of the request. Raises a 401 `Problem` without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Problem(401, "Unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


class FailureLimiter:
    """Counts requests with unknown tokens by client address. A valid token always passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}

    def record(self, request: Request) -> None:
        """Records a failure. Raises a 429 `Problem` after too many within a minute."""
        client = request.client.host if request.client else ""
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


class SharedToken(Guard):
    """Admits one token, for services without a table of tokens."""

    def __init__(self, token: str, largest_body: int = LARGEST_BODY) -> None:
        super().__init__(largest_body)
        self._expected = hash_token(token)
        self._failures = FailureLimiter()

    async def admit(self, request: Request) -> None:
        if not hmac.compare_digest(hash_token(bearer_token(request)), self._expected):
            self._failures.record(request)
            raise Problem(401, "Unauthorized", "this token is not known here")
