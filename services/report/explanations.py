"""Explains, from the steps of a run, what a reader of its figures would not guess from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from bapo_core.config import RunConfig
from bapo_core.config.rollouts import SyncConfig
from bapo_core.rewards import ANSWER, OVERLONG
from bapo_core.types import ESS_DECAY, NEAR_ESS_FRACTION
from services.buffer.api.wire import ForkOrigin, StepView


def explain_run(
    steps: Sequence[StepView], config: RunConfig, origin: ForkOrigin | None = None
) -> list[str]:
    """Returns what a reader of a run's figures would not guess from them, where it is so.

    Why no step trained, why its accuracies tell nothing, and how far its rollouts were from the
    policy that they trained.

    origin: the run that this one is a fork of.
    """
    notes = []
    if steps and not any(step.trained for step in steps):
        notes.append(f"no step trained: {explain_equal_rewards(steps)}")
    if difficulty := explain_difficulty(steps, config.task.solved_at):
        notes.append(f"in all steps, {difficulty}")
    recorded = 0 if origin is None or origin.rollouts_until is None else origin.rollouts_until
    if delay := explain_delay([step for step in steps if step.step > recorded], config.sync):
        notes.append(delay)
    return notes


def explain_delay(steps: Sequence[StepView], sync: SyncConfig) -> str:
    """Returns how far the stalest fresh rollouts were from the policy, if that is far, or "".

    They are a = `sync.every` - 1 + `sync.lag` steps old, and their effective share is exp(-d a)
    with the median d of `divergence/ess_decay` in the second half of the steps. Below
    `NEAR_ESS_FRACTION` it is far.

    steps: those with rollouts of the run's own.
    """
    oldest = sync.every - 1 + sync.lag
    measured = [step.metrics.get(ESS_DECAY) for step in steps[len(steps) // 2 :]]
    decays = [decay for decay in measured if decay is not None]
    if not 0 < oldest < len(steps) or not decays:
        return ""
    decay = median(decays)
    share = math.exp(-decay * oldest)
    if share >= NEAR_ESS_FRACTION:
        return ""
    near = math.floor(-math.log(NEAR_ESS_FRACTION) / decay)
    lag = min(sync.lag, near)
    remedy = f"sync.every={near - lag + 1}" + (f" and sync.lag={lag}" if lag < sync.lag else "")
    steps_ago = f"{oldest} step{'s' if oldest > 1 else ''} ago"
    return (
        f"the delay is far off-policy, which may cost accuracy: with a divergence/ess_decay of "
        f"{decay:.3g} a step (median of the second half of the run), rollouts of {steps_ago} keep "
        f"{share:.1%} of their effective sample size; with {remedy} the stalest would keep "
        f"{math.exp(-decay * near):.1%} (docs/experiments.md, `What a delay costs`)"
    )


def explain_equal_rewards(steps: Sequence[StepView]) -> str:
    """Returns why the batches of these steps are empty or have no gradient; "" if they have one.

    Groups that become mixed by what joins them do not count, so that it is asked of empty batches,
    or of steps whose rewards can differ by the verdicts alone.
    """
    mixed, groups = _count(steps)
    if mixed and any(step.trained for step in steps):
        return ""
    if mixed:
        return (
            f"the online filter (fresh.filter) kept none of the {mixed} groups whose rewards "
            f"differ, of {groups}"
        )
    length = any(OVERLONG in step.reward_parts for step in steps)
    return (
        f"the responses of each group had equal rewards"
        f"{' but for the punishment of length' if length else ''}, which have no gradient; read "
        "them with `bapo group` or in the dashboard (Prompts), and see docs/quickstart.md, `If the "
        "reward stays at 0`"
    )


def explain_difficulty(steps: Sequence[StepView], solved_at: float | None) -> str:
    """Returns why k of G correct does not tell how hard prompts are, though rewards differ, or "".

    It does not if no response, or every one, of these steps counts as correct.

    solved_at: `task.solved_at` of the run.
    """
    mixed, groups = _count(steps)
    if not mixed:
        return ""
    unsolved = sum(step.bins[0] for step in steps)
    solved = sum(step.bins[-1] for step in steps)
    # Rewards that differ by further parts alone, such as `format`, have a notion of correct.
    of_verdicts = any(step.reward_parts.get(ANSWER, step.mean_reward) for step in steps)
    if not of_verdicts or groups not in (unsolved, solved):
        return ""
    none = groups == unsolved
    rule = (
        "counts as correct"
        if solved_at is None
        else f"has a reward of task.solved_at={solved_at:g} or more"
    )
    mean = sum(step.reward_parts.get(ANSWER, step.mean_reward) for step in steps) / len(steps)
    remedy = (
        "set task.solved_at to the reward from which a response counts as correct"
        if solved_at is None
        else f"{'lower' if none else 'raise'} task.solved_at in a new run"
    )
    return (
        f"{'no' if none else 'every'} response {rule}, although rewards differ (mean "
        f"{mean:.3g}): groups train, but all prompts seem equally hard to what goes by the "
        f"accuracy k/G (buffers, replay window, adaptive samplers, evaluations); {remedy}"
    )


def _count(steps: Sequence[StepView]) -> tuple[int, int]:
    """Returns the number of fresh groups whose rewards differ, and of all fresh groups."""
    return sum(step.mixed for step in steps), sum(sum(step.bins) for step in steps)
