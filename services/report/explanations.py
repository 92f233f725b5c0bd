"""Explains, from the steps of a run, why nothing trains and what the rewards say of difficulty."""

from __future__ import annotations

from collections.abc import Sequence

from bapo_core.rewards import ANSWER, OVERLONG
from services.buffer.api.wire import StepView


def explain_run(steps: Sequence[StepView], solved_at: float | None) -> list[str]:
    """Returns why no step of a run trained, and why its accuracies tell nothing, where it is so.

    solved_at: `task.solved_at` of the run.
    """
    notes = []
    if steps and not any(step.trained for step in steps):
        notes.append(f"no step trained: {explain_equal_rewards(steps)}")
    if difficulty := explain_difficulty(steps, solved_at):
        notes.append(f"in all steps, {difficulty}")
    return notes


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
