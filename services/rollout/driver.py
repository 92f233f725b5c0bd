"""What a replica needs of the engine beside it, and the engine that lives in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bapo_core.errors import BapoError
from services.rollout.api.offers import WeightOffer
from services.rollout.api.wire import GeneratedGroup, GeneratedResponse, GenerateRequest
from services.rollout.engine import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from services.rollout.transformers_engine import TransformersEngine

Result = TypeVar("Result")
Accept = Callable[[int], bool]
"""Takes the number of workers that receive; whether the offer still stood."""


class EngineLost(BapoError):
    """The engine has ended, hangs or answers nonsense; it is started anew."""


class EngineDriver(Protocol):
    """An engine and its life. The replica sees to it that nothing generates during a `load`."""

    prompts_per_request: int
    """How many prompts it wants in one request; 0 = as many as there are."""

    async def load(self, directory: Path, version: int) -> None:
        """Serves the model in `directory`; starts the engine first if it does not run.

        Raises `ModelLoadError` for a directory that cannot be served, and then serves what it
        served before or nothing; `EngineLost` if the engine did not survive.
        """
        ...

    async def receive(self, offer: WeightOffer, accept: Accept) -> bool:
        """Serves what is offered, from the trainer itself, which joins once `accept` was called.

        False if it is not to be had that way: the engine is as it was. Raises `EngineLost`: nothing
        is served until the next `load`.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        """Groups as they are finished. Raises `EngineLost`."""
        ...

    async def check(self) -> None:
        """Raises `EngineLost` unless the engine generates."""
        ...

    async def close(self) -> None: ...


class TransformersDriver:
    """The laptop's engine, in a thread of this process.

    A request is generated as a whole, whatever else is asked for: the same request gives the same
    tokens and log-probs, bit for bit.
    """

    prompts_per_request = 0

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._busy = asyncio.Lock()

    async def load(self, directory: Path, version: int) -> None:
        await asyncio.to_thread(self._engine.load, directory, version)

    async def receive(self, offer: WeightOffer, accept: Accept) -> bool:  # noqa: ARG002
        """This engine takes files alone."""
        return False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        sampling = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            group_size=request.group_size,
        )
        prompts = [GenerationRequest(p.prompt_token_ids, p.seed) for p in request.prompts]
        async with self._busy:
            groups = await _to_the_end(
                asyncio.to_thread(
                    self._engine.generate, prompts, sampling, policy_version=request.policy_version
                )
            )
        for index, group in enumerate(groups):
            yield GeneratedGroup(
                index=index,
                policy_version=group.policy_version,
                responses=[
                    GeneratedResponse(
                        token_ids=response.token_ids,
                        logprobs=response.logprobs,
                        finish_reason=response.finish_reason,
                    )
                    for response in group.responses
                ],
            )

    async def check(self) -> None:
        """Lives as long as this process does."""

    async def close(self) -> None:
        """Ends with this process."""


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work`; a caller that is cancelled still waits, for a thread cannot be stopped."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            await asyncio.wait([task])
