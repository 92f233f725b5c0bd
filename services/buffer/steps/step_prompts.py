"""Selects the prompts of a step, which are rolled out fresh, re-evaluated, or evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.steps.prompt_stream import count_drawn_before, count_open_rounds
from services.buffer.steps.samplers import draw_round
from services.buffer.steps.step_groups import (
    ExpectedPrompt,
    check_rollouts,
    dataset_of_set,
    missing_groups,
    recorded_uids,
)
from services.buffer.steps.step_state import reevaluated_entries
from services.buffer.storage.artifacts import is_set_aside
from services.buffer.storage.tables import PromptRow, Run
from services.common.problems import bad_request, conflict

Columns = tuple[InstrumentedAttribute[Any], ...]
_ID = (PromptRow.id, PromptRow.uid, PromptRow.position)
_CONTENT = (*_ID, PromptRow.task, PromptRow.payload)


def select_prompts(run: Run, rollouts: wire.Rollouts, generation_round: int) -> wire.StepPrompts:
    """Returns the prompts to roll out at a step, and the policy version that answers them.

    They are not ready while the run is paused, the version is set aside, or what the prompts depend
    on is missing:

    - re-evaluated prompts: the commit of the step before;
    - fresh prompts of an adaptive sampler: the commit of `config.sampled_as_of(step)`;
    - fresh prompts of dynamic sampling: the fresh groups of all steps before.

    Raises 400 if the schedule has no such rollouts, or no such round, at this step.
    """
    config = run.config
    check_rollouts(run.config_at(rollouts.step), rollouts)
    _check_round(config, rollouts.kind, generation_round)
    version = config.rollout_version(rollouts.step, rollouts.kind)
    if rollouts.kind != "evaluation" and run.has_recorded_rollouts(rollouts.step):
        return wire.StepPrompts(ready=True, policy_version=version, prompts=[], complete=True)
    undecided = run.current_step < _decided_by(config, rollouts)
    first = _first_prompt(run, rollouts)
    if undecided or first is None or run.status == "paused" or is_set_aside(run, version):
        return wire.StepPrompts(ready=False, policy_version=version, prompts=[])
    rows = _prompt_rows(run, rollouts, generation_round, first, _CONTENT)
    items = [wire.PromptItem(uid=row.uid, task=row.task, payload=row.payload) for row in rows]
    recorded = recorded_uids(run, rollouts)
    return wire.StepPrompts(
        ready=True,
        policy_version=version,
        prompts=items,
        recorded=[item.uid for item in items if item.uid in recorded],
        complete=not missing_groups(run, rollouts),
    )


def expected_prompts(run: Run, rollouts: wire.Rollouts) -> dict[str, ExpectedPrompt]:
    """Returns every prompt that groups of these rollouts are accepted for, by uid.

    Raises 409 before the commit of the step, or the groups of the steps, that decide them.
    """
    config, (step, kind, _) = run.config, rollouts
    decided_by = _decided_by(config, rollouts)
    if run.current_step < decided_by:
        prompts = "re-evaluations" if kind == "reevaluation" else "prompts"
        raise conflict(
            f"step {decided_by} is not committed; the {prompts} of step {step} depend on it"
        )
    first = _first_prompt(run, rollouts)
    if first is None:
        raise conflict(
            f"the steps before step {step} lack fresh groups; which prompts step {step} draws "
            "depends on how many they draw"
        )
    rounds = config.rollout.max_generation_rounds if kind == "fresh" else 1
    if _is_streamed(config, kind):
        rounds = count_open_rounds(run, step)
    rows = [
        row
        for generation_round in range(rounds)
        for row in _prompt_rows(run, rollouts, generation_round, first, _ID)
    ]
    return {row.uid: ExpectedPrompt(row.id, position) for position, row in enumerate(rows)}


def depend_on_results(config: RunConfig, kind: wire.Kind) -> bool:
    """Returns whether the prompts of this kind depend on commits or groups, which may change."""
    return (
        kind == "reevaluation"
        or (kind == "fresh" and config.sampler.is_adaptive)
        or _is_streamed(config, kind)
    )


def _is_streamed(config: RunConfig, kind: wire.Kind) -> bool:
    return kind == "fresh" and config.draws_from_stream


def _check_round(config: RunConfig, kind: wire.Kind, generation_round: int) -> None:
    """Raises 400 unless fresh prompts are drawn in such a generation round."""
    last = config.rollout.max_generation_rounds - 1
    if kind == "fresh" and generation_round > last:
        raise bad_request(
            f"generation_round: {generation_round} is not in 0..{last}, the rounds of this run "
            "(rollout.max_generation_rounds)"
        )


def _first_prompt(run: Run, rollouts: wire.Rollouts) -> int | None:
    """Returns the number in the stream of a step's first prompt; None while it is not known.

    It is 0 for prompts that are not drawn from the stream.
    """
    if not _is_streamed(run.config, rollouts.kind):
        return 0
    return count_drawn_before(run, rollouts.step)


def _decided_by(config: RunConfig, rollouts: wire.Rollouts) -> int:
    """Returns the step whose commit decides the prompts; 0 if no commit does."""
    step, kind, _ = rollouts
    if kind == "reevaluation":
        return step - 1
    return config.sampled_as_of(step) if kind == "fresh" else 0


def _prompt_rows(
    run: Run,
    rollouts: wire.Rollouts,
    generation_round: int,
    first: int,
    columns: Columns,
) -> list[Row[*tuple[Any, ...]]]:
    """Returns `columns` of the prompts of rollouts, in their order."""
    step, kind, evaluation_set = rollouts
    if kind == "reevaluation":
        uids = [entry.prompt_uid for entry in reevaluated_entries(run, step)]
        return _rows_by_uid(run.session, run.train_dataset, uids, columns)
    if kind == "evaluation":
        dataset = dataset_of_set(run, evaluation_set)
        statement = select(*columns).where(PromptRow.dataset == dataset)
        return list(run.session.execute(statement.order_by(PromptRow.position)))
    positions = draw_round(run, step, generation_round, first).positions
    rows = run.session.execute(
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
