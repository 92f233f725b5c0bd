"""A rule of replay: groups are replayed the nearer to half correct they are, and not at random."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from bapo_core.algorithm import BatchRule, Composition, Decision, StepState, compose
from bapo_core.config import RunConfig
from bapo_core.config.batches import BatchConfig
from bapo_core.types import Source


class NearestConfig(BatchConfig):
    most: int = Field(64, ge=0)
    """Entries of B_high that may be replayed."""


def compose_nearest(config: RunConfig, state: StepState) -> Composition:
    """Composes the batch of Algorithm 1 from the `most` entries of B_high nearest to 1/2."""
    assert isinstance(config.batch, NearestConfig)
    most = config.batch.most
    kept = sorted(state.high, key=lambda entry: abs(entry.accuracy - 0.5))[:most]
    in_order = [entry for entry in state.high if entry in kept]
    composition = compose(config, replace(state, high=in_order))
    if not config.replays_at(state.step):
        return composition
    reasons = {}
    for entry in state.high:
        if entry not in kept:
            result = f"{entry.correct} of {entry.size} correct at step {entry.step}"
            reason = f"{result}: {most} entries are nearer to half (batch.most)"
            reasons[entry.prompt_uid] = Decision(Source.REPLAYED, "not_used", reason, entry)
    return replace(composition, decisions=composition.decisions.adding(reasons))


RULE = BatchRule(compose=compose_nearest)
