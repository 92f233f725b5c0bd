"""Prompts of a step: which are rolled out fresh, re-evaluated, or evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.artifacts import is_set_aside
from services.buffer.buffers import reevaluated_entries
from services.buffer.runs import run_config
from services.buffer.samplers import draw_positions
from services.buffer.step_groups import (
    ExpectedPrompt,
    check_step,
    dataset_of_set,
    missing_groups,
    recorded_uids,
)
from services.buffer.tables import PromptRow, Run
from services.common.errors import conflict

Columns = tuple[InstrumentedAttribute[Any], ...]
_ID = (PromptRow.id, PromptRow.uid, PromptRow.position)
_CONTENT = (*_ID, PromptRow.task, PromptRow.payload)


def select_prompts(
    session: Session,
    run: Run,
    step: int,
    kind: wire.Kind,
    generation_round: int,
    evaluation_set: str | None = None,
) -> wire.StepPrompts:
    """Returns the prompts to roll out at a step, and the policy version that answers them.

    evaluation_set: name of the set of an evaluation; None is the primary one, here and below.

    They are not ready while the run is paused or the version is set aside, and not before the
    commit that they depend on: re-evaluations on that of the step before, and fresh prompts of an
    adaptive sampler on that of `sampler.as_of`. Raises 400 if the schedule has no such rollouts at
    this step.
    """
    config = run_config(run)
    check_step(config, step, kind, evaluation_set)
    version = config.rollout_version(step, kind)
    undecided = run.current_step < _decided_by(config, step, kind)
    if undecided or run.status == "paused" or is_set_aside(session, run, version):
        return wire.StepPrompts(ready=False, policy_version=version, prompts=[])
    rows = _prompt_rows(
        session, run, config, step, kind, generation_round, evaluation_set, _CONTENT
    )
    items = [wire.PromptItem(uid=row.uid, task=row.task, payload=row.payload) for row in rows]
    recorded = recorded_uids(session, run, step, kind, evaluation_set)
    return wire.StepPrompts(
        ready=True,
        policy_version=version,
        prompts=items,
        recorded=[item.uid for item in items if item.uid in recorded],
        complete=not missing_groups(session, run, step, kind, evaluation_set),
    )


def expected_prompts(
    session: Session, run: Run, step: int, kind: wire.Kind, evaluation_set: str | None = None
) -> dict[str, ExpectedPrompt]:
    """Returns every prompt that may be rolled out at a step, by uid.

    Raises 409 before the commit of the step that decides them.
    """
    config = run_config(run)
    decided_by = _decided_by(config, step, kind)
    if run.current_step < decided_by:
        prompts = "re-evaluations" if kind == "reevaluation" else "prompts"
        raise conflict(
            f"step {decided_by} is not committed; the {prompts} of step {step} depend on it"
        )
    rounds = config.rollout.max_generation_rounds if kind == "fresh" else 1
    rows = [
        row
        for generation_round in range(rounds)
        for row in _prompt_rows(
            session, run, config, step, kind, generation_round, evaluation_set, _ID
        )
    ]
    return {row.uid: ExpectedPrompt(row.id, position) for position, row in enumerate(rows)}


def depends_on_commits(config: RunConfig, kind: wire.Kind) -> bool:
    """Returns whether the prompts of this kind depend on committed state, which a rewind undoes."""
    return kind == "reevaluation" or (kind == "fresh" and config.sampler.is_adaptive)


def _decided_by(config: RunConfig, step: int, kind: wire.Kind) -> int:
    """Returns the step whose commit decides the prompts of `step`; 0 if no commit does."""
    if kind == "reevaluation":
        return step - 1
    return config.sampled_as_of(step) if kind == "fresh" else 0


def _prompt_rows(
    session: Session,
    run: Run,
    config: RunConfig,
    step: int,
    kind: wire.Kind,
    generation_round: int,
    evaluation_set: str | None,
    columns: Columns,
) -> list[Row[*tuple[Any, ...]]]:
    """Returns `columns` of the prompts of a step and kind, in the order of their rollout."""
    if kind == "reevaluation":
        uids = [entry.prompt_uid for entry in reevaluated_entries(session, run, config, step)]
        return _rows_by_uid(session, run.train_dataset, uids, columns)
    if kind == "evaluation":
        dataset = dataset_of_set(run, evaluation_set)
        statement = select(*columns).where(PromptRow.dataset == dataset)
        return list(session.execute(statement.order_by(PromptRow.position)))
    positions = draw_positions(session, run, config, step, generation_round)
    rows = session.execute(
        select(*columns).where(
            PromptRow.dataset == run.train_dataset, PromptRow.position.in_(positions)
        )
    )
    by_position = {row.position: row for row in rows}
    return [by_position[position] for position in positions]


def _rows_by_uid(
    session: Session, dataset: str, uids: Sequence[str], columns: Columns
) -> list[Row[*tuple[Any, ...]]]:
    rows = session.execute(
        select(*columns).where(PromptRow.dataset == dataset, PromptRow.uid.in_(uids))
    )
    by_uid = {row.uid: row for row in rows}
    return [by_uid[uid] for uid in uids]
