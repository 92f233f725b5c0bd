"""The client of a replica: what it holds of an answer, whoever gives it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from services.rollout.api.wire import Generated, GeneratedGroup, GenerateRequest, PromptRequest
from services.rollout.client import LARGEST_REST, LARGEST_TOKEN, ReplicaClient
from services.rollout.errors import ReplicaFailed

CHUNK = 1 << 16
ENDLESS = 1 << 28
"""Bytes after which an endless body ends, so that a client that reads it all fails here."""


def request(group_size: int = 2, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        policy_version=1,
        manifest_digest="",
        temperature=1.0,
        max_tokens=max_tokens,
        group_size=group_size,
        prompts=[PromptRequest(prompt_token_ids=[1], seed=1)],
    )


class Body:
    """A body in chunks, which counts the bytes that were read of it."""

    def __init__(self, *chunks: bytes, repeated: bytes = b"") -> None:
        self._chunks, self._repeated = chunks, repeated
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            self.read += len(chunk)
            yield chunk
        while self._repeated and self.read < ENDLESS:
            self.read += len(self._repeated)
            yield self._repeated


def answers(body: Body, asked: GenerateRequest, status: int = 200) -> list[Generated]:
    """Returns what a client makes of an answer with this body."""

    async def generate() -> list[Generated]:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=aiter(body)))
        async with httpx.AsyncClient(transport=transport) as http:
            client = ReplicaClient("http://replica", http, "a-credential-of-a-replica")
            return [each async for each in client.generate(asked)]

    return asyncio.run(generate())


def group(asked: GenerateRequest) -> bytes:
    """Returns the longest line that answers a request."""
    response = {
        "token_ids": [9_999_999] * asked.max_tokens,
        "logprobs": [-1.2345678901234567e-300] * asked.max_tokens,
        "finish_reason": "length",
    }
    line = {"index": 0, "policy_version": 1, "responses": [response] * asked.group_size}
    return json.dumps(line).encode() + b"\n"


@pytest.mark.parametrize("begin", [b"", b"[", b'{"index": 0, "policy_version": '])
def test_a_line_without_an_end_is_not_kept(begin: bytes) -> None:
    asked = request()
    body = Body(begin, repeated=b"1" * CHUNK)
    with pytest.raises(ReplicaFailed, match="a line of its stream has more than"):
        answers(body, asked)
    limit = LARGEST_REST + asked.group_size * asked.max_tokens * LARGEST_TOKEN
    assert body.read <= limit + 2 * CHUNK


@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_refusal_is_read_in_part(status: int) -> None:
    body = Body(b"overloaded", repeated=b" " * CHUNK)
    with pytest.raises(ReplicaFailed, match=f"HTTP {status}: overloaded"):
        answers(body, request(), status)
    assert body.read <= 2 * CHUNK


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_groups_arrive_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    asked = request(rng.randrange(1, 9), rng.randrange(1, 20_000))
    text = group(asked) * 3 + group(asked)[: rng.randrange(5)]
    chunks: list[bytes] = []
    while text:
        cut = rng.choice([1, 100, CHUNK, 1 << 20])
        chunks.append(text[:cut])
        text = text[cut:]
    found = answers(Body(*chunks), asked)
    assert len(found) == 3
    for each in found:
        assert isinstance(each, GeneratedGroup)
        assert len(each.responses) == asked.group_size
