"""The data that the rules work on: summaries of groups, and the training batch made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Source(StrEnum):
    """The source of a group in a training batch."""

    FRESH = "fresh"
    """X1: rolled out by alpha for this step."""
    REEVALUATED = "reevaluated"
    """X2: a hard prompt of B_bad, answered again by the current policy theta_t."""
    REPLAYED = "replayed"
    """X3: a stored group of B_high, reused unchanged; or a response of an earlier step."""


DEMONSTRATED = "demonstrated"
"""The source of a response that is a demonstration, which no policy of the run sampled."""


ESS_DECAY = "divergence/ess_decay"
"""The metric of a step that says how fast stored tokens lose their effective share with age."""


NEAR_ESS_FRACTION = 0.9
"""Smallest effective share of stored tokens whose sampling policy counts as near the policy."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The metadata of a group (the G responses to a prompt), without its tokens.

    The accuracy is kept as the count k of k/G, which is exact.
    """

    group_id: int
    prompt_uid: str
    """Identifies the prompt in all runs, epochs and files."""
    step: int
    """The step that the group was rolled out for."""
    correct: int
    """k, the number of correct responses."""
    size: int
    """G, the number of responses."""
    policy_version: int = 0
    """The version of the policy that sampled the responses."""
    lowest_reward: float | None = None
    """Lowest reward of the responses, without the punishment of length. It is None, as the highest
    is, where it is not recorded: rewards then count as 1 for correct responses and 0 for others."""
    highest_reward: float | None = None
    """Highest reward of the responses, without the punishment of length."""

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.size or self.size < 1:
            raise ValueError(
                f"group {self.group_id}: {self.correct} correct of {self.size} responses; give a "
                "size of at least 1 and a count between 0 and the size"
            )

    @property
    def accuracy(self) -> float:
        """mu = k / G."""
        return self.correct / self.size

    @property
    def mixed(self) -> bool:
        """Whether the rewards differ, so that the group has advantages and a gradient.

        For rewards of 1 and 0, this is 1/G <= mu <= (G-1)/G.
        """
        if self.lowest_reward is None or self.highest_reward is None:
            return 0 < self.correct < self.size
        return self.lowest_reward < self.highest_reward


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A stored group in a training batch, and its source."""

    group: GroupSummary
    source: Source
    rows: tuple[int, ...] | None = None
    """Indexes of its responses that are in the batch; None for all."""
    joins_previous: bool = False
    """Whether they are compared with those of the member before, for their advantages."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A training batch: the groups of X1, X2 and X3, in that order, never padded.

    Replayed responses (`response_replay`) follow the fresh group of their prompt.
    """

    members: Sequence[BatchMember]
    capacity: int
    """Most groups that it may have."""
    window: tuple[float, float]
    """The replay window (c2, c3) of the step."""
    counts: Mapping[Source, int] = field(default_factory=dict)
    """Number of groups by source, without replayed responses."""

    @property
    def replayed_responses(self) -> int:
        """Number of single responses that are replayed (`response_replay`)."""
        return sum(
            len(member.rows)
            for member in self.members
            if member.source is Source.REPLAYED and member.rows is not None
        )

    def of(self, source: Source) -> list[GroupSummary]:
        """Returns the groups of one source, in the batch's order."""
        return [member.group for member in self.members if member.source is source]
