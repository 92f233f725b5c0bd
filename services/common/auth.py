"""Bearer tokens with scopes. Only hashes are stored or compared."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request

from services.common.guard import LARGEST_BODY, Guard
from services.common.problems import Problem


def hash_token(token: str) -> str:
    """Returns the SHA-256 of a token, which is what is stored and compared."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_token(request: Request) -> str:
    """Returns the bearer token of the request. Raises a 401 `Problem` without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Problem(401, "Unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


class SharedToken(Guard):
    """Admits one token, for services without a table of tokens."""

    def __init__(self, token: str, largest_body: int = LARGEST_BODY) -> None:
        super().__init__(largest_body)
        self._expected = hash_token(token)

    async def admit(self, request: Request) -> None:
        if not hmac.compare_digest(hash_token(bearer_token(request)), self._expected):
            raise Problem(401, "Unauthorized", "this token is not known here")
