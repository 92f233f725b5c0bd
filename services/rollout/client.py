"""The typed client of a rollout replica."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from services.common.redaction import redact, register_secret
from services.rollout.api.wire import STREAM_LINE, EngineDeath, Generated, GenerateRequest
from services.rollout.errors import EngineDied, ReplicaFailed

READ_TIMEOUT_S = 1800.0
"""Longest wait between two lines of a stream. The fleet notices a replica that has stopped much
sooner, by its missing heartbeats."""
CONNECT_TIMEOUT_S = 5.0
LARGEST_TOKEN = 64
"""Bytes of one token in a line; it has at most 35: an id of 7 digits, a log-prob of 24, commas."""
LARGEST_REST = 1 << 20
"""Bytes of a line beside its tokens: the names of its fields, or an error for people."""
LARGEST_ERROR = 2000
"""Bytes that are read of the body of a refusal."""


class ReplicaClient:
    """Generates on one replica. Groups that are missing in the answer may be asked for again."""

    def __init__(self, url: str, http: httpx.AsyncClient, token: str) -> None:
        self._url, self._http = url, http
        register_secret(token)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generated, None]:
        """Yields groups in the order in which they are completed, and tokens before that.

        Raises `ReplicaFailed` when the replica refuses the request, the connection breaks or a line
        is longer than any answer to the request, and `EngineDied` when the replica is sound but its
        engine has died.
        """
        longest = request.group_size * request.max_tokens * LARGEST_TOKEN + LARGEST_REST
        try:
            async with self._http.stream(
                "POST",
                f"{self._url}/v1/generate",
                content=request.model_dump_json(),
                headers=self._headers,
                timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            ) as response:
                if not response.is_success:
                    body = await _beginning(response)
                    raise ReplicaFailed(f"{self._url}: HTTP {response.status_code}: {body}")
                async for line in _complete_lines(response, longest):
                    generated = STREAM_LINE.validate_json(line)
                    if isinstance(generated, EngineDeath):
                        raise EngineDied(generated.died)
                    yield generated
        except (httpx.HTTPError, ValueError) as error:
            raise ReplicaFailed(
                f"{self._url}: {redact(str(error)) or type(error).__name__}"
            ) from error


async def _beginning(response: httpx.Response) -> str:
    """Returns the first characters of a body, however long it is."""
    body = b""
    async for data in response.aiter_raw():
        body += data
        if len(body) >= LARGEST_ERROR:
            break
    return body.decode(errors="replace")[:500]


async def _complete_lines(response: httpx.Response, longest: int) -> AsyncIterator[bytes]:
    """Yields complete lines; drops a line that was cut off.

    Raises `ReplicaFailed` for a line of more bytes than `longest`, without reading on.
    """
    begun = bytearray()
    async for data in response.aiter_raw():
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield bytes(begun + end)
            begun.clear()
        begun += rest
        if len(begun) > longest:
            raise ReplicaFailed(
                f"{response.url}: a line of its stream has more than {longest} bytes, which no "
                "answer to the request has; delete this replica, whose program is not bapo's"
            )
