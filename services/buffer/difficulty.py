"""What a run knows of its training prompts, and what it knew at any step before.

The groups of a prompt are the truth; everything here is derived from them. Three forms answer
three kinds of question: a row for each prompt (`prompt_difficulty`: listings, as of the last
commit), the counts of each commit (`step_record.difficulty_bins`: bins over time), and every
32nd commit the bin of every prompt in one byte each (`difficulty_snapshot`: who was where at
step s). A million prompts at any step are then one row and at most 31 steps of groups away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from services.buffer.api import wire
from services.buffer.runs import dataset_size, run_config
from services.buffer.tables import (
    DifficultySnapshot,
    PromptDifficulty,
    PromptRow,
    RolloutGroup,
    Run,
    StepRecord,
)
from services.common.errors import bad_request

SNAPSHOT_EVERY = 32
UNSEEN = 255
"""In a snapshot: a prompt that was not attempted yet."""

_DERIVE = text("""
    insert into prompt_difficulty
        (run_id, prompt_id, attempts, first_mean, last_mean, best_mean, first_solved_step,
         last_step, bin)
    select run_id, prompt_id, count(*),
        (array_agg(mean_reward order by step, kind))[1],
        (array_agg(mean_reward order by step desc, kind desc))[1],
        max(mean_reward),
        min(step) filter (where correct > 0),
        max(step),
        (array_agg(correct order by step desc, kind desc))[1]
    from rollout_group
    where run_id = :run_id and kind <> 'evaluation' and step between :first and :last
        and prompt_id = any(:prompt_ids)
    group by run_id, prompt_id
    on conflict (run_id, prompt_id) do update set
        attempts = prompt_difficulty.attempts + excluded.attempts,
        last_mean = excluded.last_mean,
        best_mean = greatest(prompt_difficulty.best_mean, excluded.best_mean),
        first_solved_step =
            coalesce(prompt_difficulty.first_solved_step, excluded.first_solved_step),
        last_step = excluded.last_step, bin = excluded.bin
""")


def update(session: Session, run: Run, step: int) -> list[int]:
    """At the commit of `step`: what its groups say; returns the prompts by bin after it."""
    touched = _touched(session, run, step, step)
    before = _bins_of(session, run, touched)
    _derive(session, run, step, step, touched)
    counts = np.array(bins_after(session, run, step - 1))
    np.subtract.at(counts, before, 1)
    np.add.at(counts, _bins_of(session, run, touched), 1)
    if step % SNAPSHOT_EVERY == 0:
        bins = bins_as_of(session, run, step).tobytes()
        session.add(DifficultySnapshot(run_id=run.id, step=step, bins=bins))
    found: list[int] = counts.tolist()
    return found


def forget(session: Session, run: Run, step: int) -> list[int]:
    """Before a rewind to `step`: drops what later groups say; returns the prompts they were of."""
    touched = _touched(session, run, step + 1, None)
    session.execute(
        delete(DifficultySnapshot).where(
            DifficultySnapshot.run_id == run.id, DifficultySnapshot.step > step
        )
    )
    session.execute(
        delete(PromptDifficulty).where(
            PromptDifficulty.run_id == run.id, PromptDifficulty.prompt_id.in_(touched)
        )
    )
    return touched


def restore(session: Session, run: Run, step: int, prompt_ids: list[int]) -> None:
    """After a rewind to `step`: derives these prompts from the groups that are left."""
    _derive(session, run, 1, step, prompt_ids)


def _touched(session: Session, run: Run, first: int, last: int | None) -> list[int]:
    """The training prompts with a group in steps first..last."""
    statement = select(RolloutGroup.prompt_id).where(
        RolloutGroup.run_id == run.id,
        RolloutGroup.step >= first,
        RolloutGroup.kind != "evaluation",
    )
    if last is not None:
        statement = statement.where(RolloutGroup.step <= last)
    return list(session.scalars(statement.distinct()))


def _bins_of(session: Session, run: Run, prompt_ids: list[int]) -> list[int]:
    return list(
        session.scalars(
            select(PromptDifficulty.bin).where(
                PromptDifficulty.run_id == run.id, PromptDifficulty.prompt_id.in_(prompt_ids)
            )
        )
    )


def _derive(session: Session, run: Run, first: int, last: int, prompt_ids: list[int]) -> None:
    """Adds what the groups of steps first..last say, which must all be new to the prompts."""
    given = {"run_id": run.id, "first": first, "last": last, "prompt_ids": prompt_ids}
    session.execute(_DERIVE, given)


# ---- any step -----------------------------------------------------------------------------------


def bins_after(session: Session, run: Run, step: int) -> list[int]:
    """Prompts by bin after the commit of `step`; those not attempted are in none."""
    record = session.get(StepRecord, (run.id, step)) if step else None
    if record is None or record.difficulty_bins is None:
        return [0] * (run_config(run).rollout.group_size + 1)
    return list(record.difficulty_bins)


def bins_as_of(session: Session, run: Run, step: int) -> NDArray[np.uint8]:
    """(prompts,) the bin of every training prompt after `step`, by position; or `UNSEEN`."""
    snapshot = session.scalar(
        select(DifficultySnapshot)
        .where(DifficultySnapshot.run_id == run.id, DifficultySnapshot.step <= step)
        .order_by(DifficultySnapshot.step.desc())
        .limit(1)
    )
    if snapshot is None:
        bins = np.full(dataset_size(session, run.train_dataset), UNSEEN, dtype=np.uint8)
    else:
        bins = np.frombuffer(snapshot.bins, dtype=np.uint8).copy()
    # Within a step a re-evaluation comes after the fresh group; of assignments the last one holds.
    order = (RolloutGroup.step, RolloutGroup.kind)
    # As two arrays: as rows, sixteen thousand groups would take four times as long.
    positions, correct = session.execute(
        select(
            func.array_agg(aggregate_order_by(PromptRow.position, *order)),
            func.array_agg(aggregate_order_by(RolloutGroup.correct, *order)),
        )
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step > (0 if snapshot is None else snapshot.step),
            RolloutGroup.step <= step,
            RolloutGroup.kind != "evaluation",
        )
    ).one()
    if positions:
        bins[positions] = correct
    return bins


def check_committed(run: Run, step: int, field: str) -> None:
    if not 0 <= step <= run.current_step:
        raise bad_request(
            f"{field}: step {step} is not in 0..{run.current_step}, the committed steps of run "
            f"{run.name!r}"
        )


def bins_at(session: Session, run: Run, step: int) -> wire.DifficultyBins:
    """Prompts by bin after a step, with the number that was not attempted by then."""
    check_committed(run, step, "step")
    bins = bins_after(session, run, step)
    prompts = dataset_size(session, run.train_dataset)
    return wire.DifficultyBins(step=step, bins=bins, unseen=prompts - sum(bins))


def bins_history(session: Session, run: Run, points: int) -> list[wire.DifficultyBins]:
    """At most about `points` steps, evenly apart, the last one among them."""
    stride = max(1, -(-run.current_step // points))
    steps = range(run.current_step, 0, -stride)
    prompts = dataset_size(session, run.train_dataset)
    rows = session.execute(
        select(StepRecord.step, StepRecord.difficulty_bins)
        .where(StepRecord.run_id == run.id, StepRecord.step.in_(steps))
        .order_by(StepRecord.step)
    )
    return [
        wire.DifficultyBins(step=step, bins=bins, unseen=prompts - sum(bins)) for step, bins in rows
    ]


def migration(session: Session, run: Run, before: int, after: int) -> wire.DifficultyMigration:
    """How the training prompts moved between bins from one step to another."""
    check_committed(run, before, "before")
    check_committed(run, after, "after")
    size = run_config(run).rollout.group_size
    rows, columns = bins_as_of(session, run, before), bins_as_of(session, run, after)
    seen_before, seen_after = rows != UNSEEN, columns != UNSEEN
    both = seen_before & seen_after
    pairs = rows[both].astype(np.int64) * (size + 1) + columns[both]
    matrix = np.bincount(pairs, minlength=(size + 1) ** 2).reshape(size + 1, size + 1)
    newly: NDArray[Any] = np.bincount(columns[seen_after & ~seen_before], minlength=size + 1)
    unsolved = rows == 0
    unlocked = unsolved & seen_after & (columns > 0)
    return wire.DifficultyMigration(
        before=before,
        after=after,
        matrix=matrix.tolist(),
        newly_attempted=newly.tolist(),
        unlocked=int(unlocked.sum()),
        unlocked_fraction=float(unlocked.sum() / unsolved.sum()) if unsolved.any() else 0.0,
    )
