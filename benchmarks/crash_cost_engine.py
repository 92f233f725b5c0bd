"""A rollout replica for `benchmarks.crash_cost`, whose groups take a known time to generate.

    python -m benchmarks.crash_cost_engine LOG

It is a replica as any other, with an engine that answers after a random time, and differently each
time it is asked. LOG gets a line of JSON when the generation of a group begins, and when it ends or
is cut off.
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
from services.rollout.api.wire import GeneratedGroup, GeneratedResponse, GenerateRequest
from services.rollout.driver import AcceptOffer

SHORTEST_S, LONGEST_S = 0.5, 3.0
"""Seconds that a group takes, uniformly distributed."""
RESPONSE_TOKENS = 6
VOCABULARY = 20
"""Tokens that answers are drawn from; the tiny model has more."""


class PacedEngine:
    """An `EngineDriver` that waits instead of computing."""

    prompts_per_request = 1

    def __init__(self, log: Path) -> None:
        self._log = log
        self._draw = random.SystemRandom()

    async def load(self, directory: Path, version: int) -> None:
        """Loads nothing."""

    async def receive(self, offer: WeightOffer, accept: AcceptOffer) -> bool:  # noqa: ARG002
        return False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        for index, prompt in enumerate(request.prompts):
            key = [request.policy_version, prompt.seed]
            identity = self._draw.getrandbits(64)
            self._write({"id": identity, "key": key, "at": time.time()})
            try:
                await asyncio.sleep(self._draw.uniform(SHORTEST_S, LONGEST_S))
            except asyncio.CancelledError:
                self._write({"id": identity, "end": "cancelled", "at": time.time()})
                raise
            self._write({"id": identity, "end": "done", "at": time.time()})
            responses = [self._response() for _ in range(request.group_size)]
            yield GeneratedGroup(
                index=index, policy_version=request.policy_version, responses=responses
            )

    async def check(self) -> None:
        """Never fails."""

    async def close(self) -> None:
        """Does nothing."""

    def _response(self) -> GeneratedResponse:
        tokens = [self._draw.randrange(5, VOCABULARY) for _ in range(RESPONSE_TOKENS)]
        logprobs = [-3.0 - self._draw.random() for _ in tokens]
        return GeneratedResponse(token_ids=tokens, logprobs=logprobs, finish_reason="stop")

    def _write(self, line: dict[str, Any]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")


def main() -> None:
    log = Path(sys.argv[1])
    server.make_driver = lambda *_: PacedEngine(log)  # type: ignore[assignment]
    server.main()


if __name__ == "__main__":
    main()
