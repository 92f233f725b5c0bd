"""A sampler and a batch rule that fail."""

from __future__ import annotations

from bapo_core.algorithm import BatchRule, Composition, StepState
from bapo_core.config import RunConfig
from bapo_core.sampling import Draw, DrawContext


def draw(context: DrawContext) -> Draw:
    return Draw([1 // (context.step - context.step)])


def compose(config: RunConfig, state: StepState) -> Composition:
    raise KeyError(f"{config.batch.rule} at step {state.step}")


RULE = BatchRule(compose=compose)
