"""Adds difficulty over time, evaluations, names of tokens, and the indexes of all listings."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SNAPSHOT_EVERY = 32
UNSEEN = 255


def upgrade() -> None:
    # Both are trusted extensions: the owner of a database may create them.
    op.execute("create extension if not exists pg_trgm")
    op.execute("create extension if not exists btree_gist")
    _create_tables()
    _add_columns()
    _create_indexes()
    _fill_in()
    op.alter_column("step_record", "bins", nullable=False)
    op.alter_column("api_token", "name", nullable=False)


def _create_tables() -> None:
    op.create_table(
        "dataset",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_dataset")),
    )
    op.create_table(
        "difficulty_snapshot",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("bins", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["run.id"],
            name=op.f("fk_difficulty_snapshot_run_id_run"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_difficulty_snapshot")),
    )
    op.create_table(
        "evaluation",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("mean_accuracy", sa.Double(), nullable=False),
        sa.Column("bins", postgresql.JSONB(), nullable=False),
        sa.Column("prompts", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_evaluation_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_evaluation")),
    )


def _add_columns() -> None:
    op.add_column("step_record", sa.Column("bins", postgresql.JSONB(), nullable=True))
    op.add_column("step_record", sa.Column("difficulty_bins", postgresql.JSONB(), nullable=True))
    op.add_column("api_token", sa.Column("name", sa.String(), nullable=True))
    op.add_column("api_token", sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True))
    op.drop_constraint(op.f("ck_run_status"), "run")
    op.create_check_constraint(
        op.f("ck_run_status"),
        "run",
        "status in ('created','running','paused','stopped','finished','failed','deleting')",
    )


def _create_indexes() -> None:
    op.drop_index(op.f("ix_prompt_difficulty_run_id_bin"), table_name="prompt_difficulty")
    op.execute(
        "create index ix_prompt_search on prompt"
        " using gin ((uid || ' ' || payload::text) gin_trgm_ops)"
    )
    for name, columns in {
        "bin": "run_id, bin, prompt_id",
        "hardest": "run_id, best_mean, (-attempts), prompt_id",
        "improved": "run_id, (first_mean - last_mean), prompt_id",
    }.items():
        op.execute(f"create index ix_prompt_difficulty_{name} on prompt_difficulty ({columns})")
    op.execute(
        "create index ix_prompt_difficulty_forgotten on prompt_difficulty (run_id, prompt_id)"
        " where bin = 0 and best_mean > 0"
    )
    op.execute(
        "create index ix_prompt_difficulty_unlocked"
        " on prompt_difficulty (run_id, first_solved_step, prompt_id) where first_mean = 0"
    )
    op.create_index("ix_prompt_place", "prompt", ["id"], postgresql_include=["position"])
    op.create_index(
        "ix_buffer_entry_inserted", "buffer_entry", ["run_id", "buffer", "inserted_step", "id"]
    )
    op.create_index(
        "ix_buffer_entry_evicted", "buffer_entry", ["run_id", "buffer", "evicted_step", "id"]
    )
    op.create_index("ix_buffer_entry_group_id", "buffer_entry", ["group_id"])
    op.create_index("ix_batch_member_group_id", "batch_member", ["group_id"])
    op.execute(
        "create index ix_buffer_entry_stay on buffer_entry"
        " using gist (run_id, int8range(inserted_step, evicted_step))"
    )


# ---- values derived from older rows -------------------------------------------------------------


def _fill_in() -> None:
    connection = op.get_bind()
    op.execute("insert into dataset select dataset, count(*) from prompt group by dataset")
    op.execute("update api_token set name = 'token ' || id")
    for run in connection.execute(sa.text("select * from run order by id")).mappings().all():
        size = int(run["config"]["rollout"]["group_size"])
        samples = int(run["config"]["evaluation"]["samples"] or size)
        _fill_in_steps(connection, run, size)
        _fill_in_evaluations(connection, run, samples)


def _fill_in_steps(connection: sa.Connection, run: sa.RowMapping, size: int) -> None:
    counted = connection.execute(
        sa.text("select size from dataset where name = :name"), {"name": run["train_dataset"]}
    )
    current = bytearray([UNSEEN]) * (counted.scalar() or 0)
    total = [0] * (size + 1)
    steps = connection.execute(
        sa.text("select step, committed_at from step_record where run_id = :id order by step"),
        {"id": run["id"]},
    ).all()
    for step, committed_at in steps:
        groups = connection.execute(
            sa.text(
                "select g.kind, g.correct, p.position from rollout_group g"
                " join prompt p on p.id = g.prompt_id"
                " where g.run_id = :id and g.step = :step and g.kind <> 'evaluation'"
                " order by g.kind"
            ),
            {"id": run["id"], "step": step},
        ).all()
        bins = [0] * (size + 1)
        for kind, correct, position in groups:
            bins[correct] += kind == "fresh"
            if committed_at is not None:
                if current[position] != UNSEEN:
                    total[current[position]] -= 1
                total[correct] += 1
                current[position] = correct
        values = {
            "id": run["id"],
            "step": step,
            "bins": bins,
            "total": total if committed_at is not None else None,
        }
        connection.execute(_FILL_STEP, values)
        if committed_at is not None and step % SNAPSHOT_EVERY == 0:
            connection.execute(
                sa.text("insert into difficulty_snapshot values (:id, :step, :bins)"),
                {"id": run["id"], "step": step, "bins": bytes(current)},
            )


_FILL_STEP = sa.text(
    "update step_record set bins = :bins, difficulty_bins = :total"
    " where run_id = :id and step = :step"
).bindparams(
    sa.bindparam("bins", type_=postgresql.JSONB()),
    sa.bindparam("total", type_=postgresql.JSONB(none_as_null=True)),
)


def _fill_in_evaluations(connection: sa.Connection, run: sa.RowMapping, samples: int) -> None:
    rows = connection.execute(
        sa.text(
            "select step, correct, token_count from rollout_group"
            " where run_id = :id and kind = 'evaluation'"
        ),
        {"id": run["id"]},
    )
    correct: dict[int, list[int]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    for step, count, token_count in rows:
        correct[step].append(count)
        tokens[step] += token_count
    prompts = connection.execute(
        sa.text("select size from dataset where name = :name"), {"name": run["test_dataset"]}
    ).scalar()
    for step, counts in correct.items():
        if len(counts) != prompts:
            continue
        bins = [0] * (samples + 1)
        for count in counts:
            bins[count] += 1
        values = {
            "id": run["id"],
            "step": step,
            "mean": sum(counts) / (len(counts) * samples),
            "bins": bins,
            "prompts": len(counts),
            "tokens": tokens[step],
        }
        connection.execute(_FILL_EVALUATION, values)


_FILL_EVALUATION = sa.text(
    "insert into evaluation values (:id, :step, :mean, :bins, :prompts, :tokens)"
).bindparams(sa.bindparam("bins", type_=postgresql.JSONB()))


def downgrade() -> None:
    op.execute("update run set status = 'failed' where status in ('paused','stopped','deleting')")
    op.drop_constraint(op.f("ck_run_status"), "run")
    op.create_check_constraint(
        op.f("ck_run_status"), "run", "status in ('created','running','finished','failed')"
    )
    # Without the column, a revoked token would be valid again.
    op.execute("delete from api_token where revoked_at is not null")
    for name in ("inserted", "evicted", "group_id", "stay"):
        op.drop_index(f"ix_buffer_entry_{name}", table_name="buffer_entry")
    op.drop_index("ix_batch_member_group_id", table_name="batch_member")
    for name in ("bin", "hardest", "improved", "unlocked", "forgotten"):
        op.drop_index(f"ix_prompt_difficulty_{name}", table_name="prompt_difficulty")
    op.create_index(op.f("ix_prompt_difficulty_run_id_bin"), "prompt_difficulty", ["run_id", "bin"])
    op.drop_index("ix_prompt_search", table_name="prompt")
    op.drop_index("ix_prompt_place", table_name="prompt")
    op.drop_column("api_token", "revoked_at")
    op.drop_column("api_token", "name")
    op.drop_column("step_record", "difficulty_bins")
    op.drop_column("step_record", "bins")
    for table in ("evaluation", "difficulty_snapshot", "dataset"):
        op.drop_table(table)
