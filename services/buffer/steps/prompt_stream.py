"""Finds where a step's prompts begin in the stream of dynamic sampling, by recorded groups.

A step with dynamic sampling and the uniform sampler draws as many rounds of B prompts as it needs,
and the next step goes on with the next prompt (`bapo_core.sampling.stream_positions`). A step has a
fresh group for each prompt that it drew, so the first prompt of a step follows from the number of
groups of the steps before it, once these are complete. Nothing else is stored for it.
"""

from __future__ import annotations

from sqlalchemy import func, select

from services.buffer.steps.step_groups import IS_MIXED, count_groups, missing_fresh
from services.buffer.storage.lineage import of_run
from services.buffer.storage.tables import RolloutGroup, Run, StepRecord


def count_drawn_before(run: Run, step: int) -> int | None:
    """Returns the number of prompts that the steps before `step` drew.

    It is None while one of these steps lacks fresh groups: how many prompts it draws is not known.
    """
    # A step with a batch has all its groups, and its record counts them.
    with_batch, drawn = run.session.execute(
        select(
            func.count(), func.coalesce(func.sum(StepRecord.counts["rolled_out"].as_integer()), 0)
        ).where(of_run(run, StepRecord.run_id, StepRecord.step), StepRecord.step < step)
    ).one()
    if with_batch == step - 1:
        return int(drawn)
    ahead = run.session.execute(
        select(RolloutGroup.step, func.count(), func.count().filter(IS_MIXED))
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step > with_batch,
            RolloutGroup.step < step,
            RolloutGroup.kind == "fresh",
        )
        .group_by(RolloutGroup.step)
    ).all()
    if len(ahead) < step - 1 - with_batch:
        return None
    if any(
        missing_fresh(run.config, earlier, recorded, mixed) for earlier, recorded, mixed in ahead
    ):
        return None
    return int(drawn) + sum(recorded for _, recorded, _ in ahead)


def count_open_rounds(run: Run, step: int) -> int:
    """Returns how many generation rounds of a step groups are accepted for.

    These are the rounds that are recorded and, unless the step is complete, the next one. The
    prompts after them belong to the next step as soon as this one is complete.
    """
    recorded, mixed = count_groups(run, step, "fresh")
    complete = not missing_fresh(run.config, step, recorded, mixed)
    return recorded // run.config.rollout.prompts_per_step + (not complete)
