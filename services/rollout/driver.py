"""The interface between a replica and its engine, and the driver of the in-process engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from services.rollout.api.offers import WeightOffer
from services.rollout.api.wire import Generated, GeneratedGroup, GenerateRequest

if TYPE_CHECKING:
    from services.rollout.transformers_engine import TransformersEngine

Result = TypeVar("Result")
AcceptOffer = Callable[[int], bool]
"""Accepts an offer with the number of workers that receive; False if the offer has expired."""


class EngineDriver(Protocol):
    """Starts, feeds and stops an engine. The replica never calls `load` during a `generate`."""

    prompts_per_request: int
    """Preferred number of prompts in one request; 0 for as many as there are."""

    async def load(self, directory: Path, version: int) -> None:
        """Serves the model in `directory`; starts the engine first if it does not run.

        Raises `ModelLoadError` for a directory that cannot be served; the engine then serves the
        version from before, or nothing. Raises `EngineLost` if the engine did not survive.
        """
        ...

    async def prepare(self, directory: Path) -> None:
        """Does what the first `load` would do anyway, with a model of the same architecture.

        Nothing is served afterwards. Raises what `load` raises.
        """
        ...

    async def receive(self, offer: WeightOffer, accept: AcceptOffer) -> bool:
        """Receives the offered weights by NCCL; the trainer joins once `accept` was called.

        Returns False, with the engine unchanged, if this engine cannot take the offer or the offer
        has expired. Raises `EngineLost` if the transfer fails; then nothing is served until the
        next `load`.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        """Yields groups as they are completed, and tokens before that. Raises `EngineLost`."""
        ...

    async def check(self) -> None:
        """Raises `EngineLost` unless the engine generates."""
        ...

    async def metrics(self) -> str:
        """Returns the engine's own metrics in Prometheus's text format; empty if it has none."""
        ...

    async def close(self) -> None:
        """Stops the engine."""
        ...


class TransformersDriver:
    """An `EngineDriver` for the transformers engine, which runs in a thread of this process.

    A request is generated as a whole and independently of other requests: the same request gives
    the same tokens and log-probs, bit for bit.
    """

    prompts_per_request = 0

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()

    async def load(self, directory: Path, version: int) -> None:
        async with self._lock:
            await _wait_to_end(asyncio.to_thread(self._engine.load, directory, version))

    async def prepare(self, directory: Path) -> None:
        """Builds the model, so that the first version is copied into it."""
        async with self._lock:
            await _wait_to_end(asyncio.to_thread(self._engine.prepare, directory))

    async def receive(self, offer: WeightOffer, accept: AcceptOffer) -> bool:  # noqa: ARG002
        """Returns False: this engine loads files only."""
        return False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        assert not any(prompt.started for prompt in request.prompts)
        async with self._lock:
            groups = await _wait_to_end(
                asyncio.to_thread(
                    self._engine.generate,
                    request.prompts,
                    request,
                    policy_version=request.policy_version,
                )
            )
        for group in groups:
            yield group

    async def check(self) -> None:
        """Never raises: the engine runs as long as this process does."""

    async def metrics(self) -> str:
        """Returns nothing: this engine has no metrics of its own."""
        return ""

    async def close(self) -> None:
        """Does nothing: the engine ends with this process."""


async def _wait_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work` even if the caller is cancelled, because a thread cannot be stopped."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            await asyncio.wait([task])
