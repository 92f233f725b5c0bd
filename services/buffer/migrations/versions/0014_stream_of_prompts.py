"""Deletes the groups of steps that dynamic sampling has begun and not completed.

Their prompts were those that the step had reserved; the rest of the step is drawn from the stream
(`bapo_core.sampling.stream_positions`), and the prompts of one step must come from one of them. The
collector generates the groups again. Steps that have all their groups keep them.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# A step is complete as in `step_groups.missing_fresh`; one that has a batch is.
DELETE_INCOMPLETE = """
    with dynamic as (
        select run.id, run.current_step, rollout.b, rollout.rounds, coalesce(
            cast(config #>> '{batch,capacity}' as float8),
            round(rollout.b / coalesce(cast(config #>> '{batch,fresh_fraction}' as float8), 1))
        ) as capacity
        from run cross join lateral (
            select cast(config #>> '{rollout,prompts_per_step}' as bigint) as b,
                cast(config #>> '{rollout,max_generation_rounds}' as bigint) as rounds
        ) as rollout
        where rollout.rounds > 1 and coalesce(config #>> '{sampler,kind}', 'uniform') = 'uniform'
    ), incomplete as (
        select dynamic.id as run_id, step
        from rollout_group join dynamic on dynamic.id = run_id
        where kind = 'fresh' and step > current_step and not exists (
            select from step_record as record
            where record.run_id = dynamic.id and record.step = rollout_group.step
        )
        group by dynamic.id, step, b, rounds, capacity
        having count(*) % b <> 0 or (
            count(*) < b * rounds
            and count(*) filter (where correct between 1 and size - 1) < capacity
        )
    )
    delete from rollout_group using incomplete
    where rollout_group.run_id = incomplete.run_id and rollout_group.step = incomplete.step
        and rollout_group.kind = 'fresh'
"""


def upgrade() -> None:
    op.execute(DELETE_INCOMPLETE)


def downgrade() -> None:
    # The steps that are not complete would go on with the prompts that are reserved for them.
    op.execute(DELETE_INCOMPLETE)
