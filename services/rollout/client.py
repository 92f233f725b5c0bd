"""The typed client of a rollout replica."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from bapo_core.errors import BapoError
from services.rollout.api.wire import GeneratedGroup, GenerateRequest

LONGEST_SILENCE_S = 1800.0
"""Between two groups of an answer. A replica that has died is noticed sooner, by its reports."""


class ReplicaFailed(BapoError):
    """A replica did not finish what it was asked for; another one may."""


class ReplicaClient:
    """Generates on one replica. What it did not finish may be asked for again."""

    def __init__(self, url: str, http: httpx.AsyncClient, token: str) -> None:
        self._url, self._http = url, http
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        """Groups in the order in which they are finished. Raises `ReplicaFailed`."""
        try:
            async with self._http.stream(
                "POST",
                f"{self._url}/v1/generate",
                content=request.model_dump_json(),
                headers=self._headers,
                timeout=httpx.Timeout(LONGEST_SILENCE_S, connect=5.0),
            ) as response:
                if not response.is_success:
                    words = (await response.aread()).decode(errors="replace")[:500]
                    raise ReplicaFailed(f"{self._url}: HTTP {response.status_code}: {words}")
                async for line in _lines(response):
                    yield GeneratedGroup.model_validate_json(line)
        except (httpx.HTTPError, ValueError) as error:
            raise ReplicaFailed(f"{self._url}: {error or type(error).__name__}") from error


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Whole lines; a line that was cut off is dropped."""
    rest: list[bytes] = []
    async for data in response.aiter_raw():
        *whole, last = data.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line])
            rest = []
        rest.append(last)
