"""A rule of replay: groups are replayed the nearer to half correct they are, and not at random."""

from __future__ import annotations

from dataclasses import replace

from bapo_core.algorithm import BatchRule, Composition, Decision, StepState, compose
from bapo_core.config import RunConfig
from bapo_core.types import GroupSummary, Source


def compose_nearest(config: RunConfig, state: StepState) -> Composition:
    """Composes the batch of Algorithm 1 from the `most` entries of B_high nearest to 1/2."""
    most = config.batch.options.get("most", 64)
    kept = sorted(state.high, key=distance)[:most]
    in_order = [entry for entry in state.high if entry in kept]
    composition = compose(config, replace(state, high=in_order))
    if not config.replays_at(state.step):
        return composition
    reasons = {
        entry.prompt_uid: Decision(
            Source.REPLAYED,
            "not_used",
            f"{entry.correct} of {entry.size} correct at step {entry.step}: {most} entries are "
            "nearer to half (batch.options.most)",
            entry,
        )
        for entry in state.high
        if entry not in kept
    }
    return replace(composition, decisions=composition.decisions.adding(reasons))


def distance(entry: GroupSummary) -> float:
    return abs(entry.accuracy - 0.5)


RULE = BatchRule(compose=compose_nearest)
