"""A rollout replica for `benchmarks.crash_cost`, whose groups take a known time to generate.

    python -m benchmarks.crash_cost_engine LOG TOKENS SHORTEST_S LONGEST_S

It is a replica as any other, with an engine whose responses have a known number of tokens and take
a random time, and which answers differently each time it is asked. LOG gets a line of JSON when the
generation of a group begins, and when it ends or is cut off.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from services.rollout import server
from services.rollout.api.offers import WeightOffer
from services.rollout.api.wire import (
    Generated,
    GeneratedGroup,
    GeneratedResponse,
    GeneratedTokens,
    GenerateRequest,
    StartedResponse,
)
from services.rollout.driver import AcceptOffer

VOCABULARY = 20
"""Tokens that answers are drawn from; the tiny model has more."""


class PacedEngine:
    """An `EngineDriver` that waits instead of computing."""

    prompts_per_request = 1

    def __init__(self, log: Path, tokens: int, shortest_s: float, longest_s: float) -> None:
        """tokens: of each response. shortest_s, longest_s: a group takes a time between these."""
        self._log, self._tokens = log, tokens
        self._bounds_s = shortest_s, longest_s
        self._draw = random.SystemRandom()

    async def load(self, directory: Path, version: int) -> None:
        """Loads nothing."""

    async def receive(self, offer: WeightOffer, accept: AcceptOffer) -> bool:  # noqa: ARG002
        return False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        for index, prompt in enumerate(request.prompts):
            empty = [StartedResponse(token_ids=[], logprobs=[]) for _ in range(request.group_size)]
            responses = [response.model_copy(deep=True) for response in prompt.started or empty]
            start = min(len(response.token_ids) for response in responses)
            token_s = self._draw.uniform(*self._bounds_s) / self._tokens
            identity = self._draw.getrandbits(64)
            key = [request.policy_version, prompt.seed]
            began = {"id": identity, "key": key, "continued_s": start * token_s, "at": time.time()}
            self._write(began)
            try:
                while start < self._tokens:
                    end = min(start + (request.stream_every or self._tokens), self._tokens)
                    await asyncio.sleep((end - start) * token_s)
                    for number, response in enumerate(responses):
                        if len(response.token_ids) < end:
                            tokens = self._extend(request, index, number, response, end)
                            if request.stream_every:
                                yield tokens
                    start = end
            except (asyncio.CancelledError, GeneratorExit):
                self._write({"id": identity, "end": "cancelled", "at": time.time()})
                raise
            self._write({"id": identity, "end": "done", "at": time.time()})
            yield GeneratedGroup(
                index=index,
                policy_version=request.policy_version,
                responses=[GeneratedResponse(**response.model_dump()) for response in responses],
            )

    def _extend(
        self,
        request: GenerateRequest,
        index: int,
        number: int,
        response: StartedResponse,
        end: int,
    ) -> GeneratedTokens:
        """Draws tokens of a response up to its length `end`."""
        start = len(response.token_ids)
        for _ in range(start, end):
            response.token_ids.append(self._draw.randrange(5, VOCABULARY))
            response.logprobs.append(-3.0 - self._draw.random())
        response.finish_reason = "stop" if end == self._tokens else None
        return GeneratedTokens(
            index=index,
            policy_version=request.policy_version,
            response=number,
            start=start,
            token_ids=response.token_ids[start:],
            logprobs=response.logprobs[start:],
            finish_reason=response.finish_reason,
        )

    async def check(self) -> None:
        """Never fails."""

    async def close(self) -> None:
        """Does nothing."""

    def _write(self, line: dict[str, Any]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")


def main() -> None:
    log, tokens, shortest_s, longest_s = sys.argv[1:]
    engine = PacedEngine(Path(log), int(tokens), float(shortest_s), float(longest_s))
    server.make_driver = lambda *_: engine  # type: ignore[assignment]
    server.main()


if __name__ == "__main__":
    main()
