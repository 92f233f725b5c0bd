"""Explains why a prompt is, or is not, in the training batch of a step, by recorded reasons."""

from __future__ import annotations

from sqlalchemy import select

from bapo_core.types import Source
from services.buffer.api import wire
from services.buffer.queries.prompts import find_prompt
from services.buffer.steps.samplers import explain_draw
from services.buffer.steps.step_state import read_decisions
from services.buffer.storage.tables import BatchMemberRow, RolloutGroup, Run, StepRecord
from services.common.problems import not_found


def explain_decision(run: Run, step: int, uid: str) -> wire.Decision:
    """Returns what X1, X2 and X3 decided about a prompt at a step.

    Raises 404 if the batch of the step has not been built, or if the run has no such prompt.
    """
    name, run = run.name, run.of_step(step)
    record = run.session.get(StepRecord, (run.id, step))
    if record is None:
        raise not_found(f"batch of step {step} in run {name!r}")
    prompt = find_prompt(run, uid)
    config = run.config_at(step)
    source = run.session.scalar(
        select(BatchMemberRow.source)
        .join(RolloutGroup, RolloutGroup.id == BatchMemberRow.group_id)
        .where(
            BatchMemberRow.run_id == run.id,
            BatchMemberRow.step == step,
            RolloutGroup.prompt_id == prompt.id,
        )
        .order_by(BatchMemberRow.position)
        .limit(1)
    )
    decided = read_decisions(run, step, uid)
    draw = explain_draw(run, step, prompt)
    fresh = decided[Source.FRESH]
    if fresh.outcome == "not_considered" and draw is not None:
        fresh.reason = f"not drawn: {draw.reason}"
    return wire.Decision(
        step=step,
        uid=uid,
        used=source is not None,
        source=source,
        c1=config.reevaluate.c1,
        c2=record.c2,
        c3=record.c3,
        capacity=config.batch_capacity,
        counts=record.counts,
        considered=list(decided.values()),
        draw=draw,
    )
