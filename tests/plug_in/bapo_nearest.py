"""A rule of replay: groups are replayed the nearer to half correct they are, and not at random."""

from __future__ import annotations

from pydantic import Field

from bapo_core.algorithm import BatchRule, Composition, StepState, compose, find_candidates
from bapo_core.config import RunConfig
from bapo_core.config.batches import BatchConfig


class NearestConfig(BatchConfig):
    most: int = Field(64, ge=0)
    """Entries of B_high that may be replayed."""


def compose_nearest(config: RunConfig, state: StepState) -> Composition:
    """Composes the batch of Algorithm 1 with replays of the `most` candidates nearest to 1/2."""
    assert isinstance(config.batch, NearestConfig)
    most = config.batch.most
    candidates = find_candidates(config, state)
    candidates.sort(key=lambda entry: abs(entry.accuracy - 0.5))
    reason = f"{most} candidates are nearer to half (batch.most)"
    return compose(config, state, left_out={entry.group_id: reason for entry in candidates[most:]})


RULE = BatchRule(compose=compose_nearest)
