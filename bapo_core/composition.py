"""The data of Algorithm 1: the state that a step's decisions depend on, and what is decided."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bapo_core.response_replay import StoredResponse
from bapo_core.types import GroupSummary, Source, TrainingBatch

Outcome = Literal["used", "not_used", "not_considered"]


@dataclass(frozen=True, slots=True)
class StepState:
    """The state that the decisions of a step depend on."""

    step: int
    fresh: Sequence[GroupSummary]
    """The step's unfiltered fresh groups, in the order in which their prompts were drawn."""
    reevaluated: Sequence[GroupSummary] = ()
    """The step's re-evaluated groups, one for each entry of B_bad that was drawn for it."""
    hard: Sequence[GroupSummary] = ()
    """B_bad after the commit of the step before, oldest first."""
    high: Sequence[GroupSummary] = ()
    """B_high after the commit of the step before, oldest first."""
    r_tot_before: float | None = None
    """r_tot of the step before; None at the first step."""
    ess_decay: float | None = None
    """Decay per step of the effective share of stored tokens with the age of their policy, as the
    committed steps have measured it (`bapo_core.buffers.median_decay`); None if none has, or if no
    rule needs it."""
    revisited: int = 0
    """Number of fresh groups, the first ones, whose prompts were drawn for their past successes."""
    caches: Mapping[str, Sequence[StoredResponse]] = field(default_factory=dict)
    """Responses of earlier steps by prompt uid, oldest first, for the fresh groups that
    `response_replay` may add responses to."""
    demonstrated: Collection[str] = frozenset()
    """Uids of the prompts of `fresh` and `hard` that have a demonstration."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How a source of the batch decided on a prompt, and why."""

    source: Source
    outcome: Outcome
    """Whether the source put the prompt into the batch; `not_considered` if it had no group."""
    reason: str
    """Explanation for people, with the values and limits that the outcome rests on."""
    group: GroupSummary | None = None
    """The group that the source considered."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """How each source of a batch decided on each prompt."""

    by_prompt: Mapping[str, Sequence[Decision]] = field(default_factory=dict)
    """Decisions on the prompts that a source considered, by the prompt's uid."""
    otherwise: Sequence[Decision] = ()
    """The decision of each source on the prompts that it did not consider."""

    def on_prompt(self, uid: str) -> dict[Source, Decision]:
        """Returns the decision of every source on a prompt, in the order of `otherwise`."""
        decided = {decision.source: decision for decision in self.by_prompt.get(uid, ())}
        return {default.source: decided.get(default.source, default) for default in self.otherwise}

    def adding(self, decisions: Mapping[str, Decision]) -> Decisions:
        """Returns these decisions with one more for each prompt that has none of its source."""
        by_prompt = dict(self.by_prompt)
        for uid, decision in decisions.items():
            before = by_prompt.get(uid, ())
            if all(other.source is not decision.source for other in before):
                by_prompt[uid] = [*before, decision]
        return replace(self, by_prompt=by_prompt)


@dataclass(frozen=True, slots=True)
class Composition:
    """The batch of a step, with what it was composed by and the reasons."""

    batch: TrainingBatch
    r_tot: float
    """The running accuracy of Eq. 8, in [0, 1], which moves the replay window."""
    supervised: Sequence[GroupSummary] = ()
    """Entries of B_bad whose demonstrations the step has a supervised update on (ReLIFT)."""
    decisions: Decisions = field(default_factory=Decisions)
    """How each source decided on each prompt."""
