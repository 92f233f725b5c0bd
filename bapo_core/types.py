"""The nouns: prompt, response, group, and what a buffer keeps of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """Which of the three parts of a training batch a group belongs to."""

    FRESH = "fresh"
    """X1: rolled out for this step."""
    REEVALUATED = "reevaluated"
    """X2: a stored hard prompt, generated again with the current policy."""
    REPLAYED = "replayed"
    """X3: a stored group of medium difficulty, reused unchanged."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a dataset. `uid` is stable across runs, epochs and machines."""

    uid: str
    task: str
    payload: Mapping[str, Any]
    dataset: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled answer: token ids, their behaviour log-probs, its reward (0 or 1)."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    finish_reason: str
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a response has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs"
            )


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the rules need to know of a group: metadata only, no tokens.

    The mean reward is kept as a count on the k/G grid, so thresholds never meet rounding.
    """

    group_id: int
    prompt_uid: str
    step: int
    correct: int
    size: int
    policy_version: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.size or self.size < 1:
            raise ValueError(
                f"group {self.group_id}: {self.correct} correct of {self.size} is impossible"
            )

    @property
    def mean_reward(self) -> float:
        """mu = k / G."""
        return self.correct / self.size

    @property
    def mixed(self) -> bool:
        """1/G <= mu <= (G-1)/G: the group carries a gradient."""
        return 0 < self.correct < self.size


@dataclass(frozen=True, slots=True)
class Group:
    """The G responses to one prompt, all by one policy version. Whole or absent."""

    prompt: Prompt
    responses: Sequence[Response]
    policy_version: int
    step: int

    def __post_init__(self) -> None:
        if not self.responses:
            raise ValueError(f"the group of prompt {self.prompt.uid} has no responses")

    @property
    def correct(self) -> int:
        return sum(1 for response in self.responses if response.reward > 0.5)

    @property
    def mean_reward(self) -> float:
        return self.correct / len(self.responses)

    def summary(self, group_id: int) -> GroupSummary:
        return GroupSummary(
            group_id=group_id,
            prompt_uid=self.prompt.uid,
            step=self.step,
            correct=self.correct,
            size=len(self.responses),
            policy_version=self.policy_version,
        )


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A group in a training batch and the part of the batch it came from."""

    group: GroupSummary
    source: Source


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """X1, X2, X3 in that order; at most the capacity, never padded."""

    members: Sequence[BatchMember]
    capacity: int
    window: tuple[float, float]
    counts: Mapping[Source, int] = field(default_factory=dict)

    def of(self, source: Source) -> list[GroupSummary]:
        return [member.group for member in self.members if member.source is source]
