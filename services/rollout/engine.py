"""The protocol of a rollout engine: prompts and a policy version in, whole groups out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bapo_core.errors import BapoError


class WrongVersion(BapoError):
    """The engine was asked for a policy version that it does not serve."""


class ModelLoadError(BapoError):
    """A directory holds no model that this engine can load; the message says why."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample: the whole distribution at `temperature`, `group_size` times a prompt."""

    temperature: float
    max_tokens: int
    group_size: int

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.max_tokens < 1 or self.group_size < 1:
            raise ValueError(f"temperature, max_tokens and group_size must be positive: {self}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt. All randomness of its group comes from `seed`, whatever else is in the batch."""

    prompt_token_ids: Sequence[int]
    seed: int

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("a prompt needs at least one token")


@dataclass(frozen=True, slots=True)
class SampledResponse:
    """Tokens with the end token if it came, and their log-probs under what sampled them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GeneratedGroup:
    """The responses to one prompt, all by one policy version."""

    responses: list[SampledResponse]
    policy_version: int


class Engine(Protocol):
    """Samples groups from the one policy version that it has loaded."""

    @property
    def version(self) -> int: ...

    def load(self, directory: Path, version: int) -> None:
        """Serves the model of a Hugging Face directory. Raises `ModelLoadError`."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        *,
        policy_version: int,
    ) -> list[GeneratedGroup]:
        """A group for each request, in order. Raises `WrongVersion` if it serves another."""
        ...
