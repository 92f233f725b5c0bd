"""What a run works at now: which groups it has, and whether its trainer has a batch."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import func, select

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.steps.step_groups import count_evaluated, count_groups, missing_fresh
from services.buffer.steps.step_state import reevaluated_entries
from services.buffer.storage.datasets import dataset_size
from services.buffer.storage.lineage import of_run
from services.buffer.storage.tables import EvaluationRecord, Run, StepRecord, WeightVersion


def read_progress(run: Run) -> wire.RunProgress:
    """Returns the rollouts that the run waits for, and whether its trainer trains meanwhile."""
    step = run.current_step + 1
    newest = select(func.max(WeightVersion.version)).where(
        WeightVersion.run_id == run.id, WeightVersion.status != "set_aside"
    )
    has_batch = step <= run.config.steps and run.session.get(StepRecord, (run.id, step)) is not None
    rollouts = [] if has_batch or step > run.config.steps else list(_rollouts_of_step(run, step))
    return wire.RunProgress(
        step=step,
        has_batch=has_batch,
        newest_version=run.session.scalar(newest) or 0,
        rollouts=rollouts + _open_evaluations(run),
    )


def _rollouts_of_step(run: Run, step: int) -> Iterator[wire.RolloutProgress]:
    recorded, mixed = count_groups(run, step, "fresh")
    yield wire.RolloutProgress(
        kind="fresh",
        step=step,
        groups=recorded,
        expected=_expected_fresh(run.config, step, recorded, mixed),
    )
    if run.config.reevaluates_at(step):
        yield wire.RolloutProgress(
            kind="reevaluation",
            step=step,
            groups=count_groups(run, step, "reevaluation")[0],
            expected=len(reevaluated_entries(run, step)),
        )


def _expected_fresh(config: RunConfig, step: int, recorded: int, mixed: int) -> int:
    """Returns the groups of all generation rounds of a step that have begun, or are due."""
    if not missing_fresh(config, step, recorded, mixed):
        return recorded
    per_round = config.rollout.prompts_per_step
    return per_round * (recorded // per_round + 1)


def _open_evaluations(run: Run) -> list[wire.RolloutProgress]:
    """Returns the evaluations of trained versions that are not complete, the oldest first."""
    measured = set(
        run.session.execute(
            select(EvaluationRecord.version, EvaluationRecord.evaluation_set).where(
                of_run(run, EvaluationRecord.run_id, EvaluationRecord.version)
            )
        ).tuples()
    )
    due = [
        (version, name)
        for version in range((run.fork_step or 0) + 1, run.current_step + 2)
        for name in run.config_at(version).evaluation_sets_at(version)
        if (version, name) not in measured
    ]
    return [
        wire.RolloutProgress(
            kind="evaluation",
            step=version,
            evaluation_set=name,
            groups=count_evaluated(run, version, run.test_datasets[name]),
            expected=dataset_size(run.session, run.test_datasets[name]),
        )
        for version, name in due
    ]
