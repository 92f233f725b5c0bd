"""Bearer tokens with scopes. Only hashes are stored or compared."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from fastapi import Request

from services.common.errors import Problem

SCOPES = ("read", "run", "admin")
"""Each includes the ones before it."""


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_token(request: Request) -> str:
    """The token of the request; 401 without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Problem(401, "Unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


def covers(held: str, wanted: str) -> bool:
    """Whether a token of scope `held` may do what needs scope `wanted`."""
    return SCOPES.index(held) >= SCOPES.index(wanted)


def require_shared_token(expected: str) -> Callable[[Request], None]:
    """A dependency for services without a database: one token, from the environment."""
    expected_hash = hash_token(expected)

    def check(request: Request) -> None:
        if not hmac.compare_digest(hash_token(bearer_token(request)), expected_hash):
            raise Problem(401, "Unauthorized", "this token is not known here")

    return check
