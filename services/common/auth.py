"""Bearer tokens with scopes. Only hashes are stored or compared."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from fastapi import Request

from services.common.problems import Problem
from services.common.scopes import SCOPES


def hash_token(token: str) -> str:
    """Returns the SHA-256 of a token, which is what is stored and compared."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_token(request: Request) -> str:
    """Returns the bearer token of the request. Raises a 401 `Problem` without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Problem(401, "Unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


def covers(held: str, required: str) -> bool:
    """Returns whether the scope `held` includes the scope `required`."""
    order: tuple[str, ...] = SCOPES
    return order.index(held) >= order.index(required)


def require_shared_token(expected: str) -> Callable[[Request], None]:
    """Returns a dependency that accepts one token, for services without a table of tokens."""
    expected_hash = hash_token(expected)

    def check(request: Request) -> None:
        if not hmac.compare_digest(hash_token(bearer_token(request)), expected_hash):
            raise Problem(401, "Unauthorized", "this token is not known here")

    return check
