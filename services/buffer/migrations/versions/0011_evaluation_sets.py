"""Adds evaluation sets: their datasets, and their results by run, version and set.

A run of before has one set, `test`. Going back keeps the primary set of each run, and the groups of
the others with it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# The set that stands for a run: `evaluation.primary`, or the first by name in the byte order that
# `min` has in Python.
_PRIMARY = """coalesce(
    run.config #>> '{evaluation,primary}',
    (select min(name collate "C") from jsonb_object_keys(run.test_datasets) name)
)"""


def upgrade() -> None:
    op.add_column("run", sa.Column("test_datasets", JSONB(), nullable=True))
    op.execute("update run set test_datasets = jsonb_build_object('test', test_dataset)")
    op.alter_column("run", "test_datasets", nullable=False)
    op.drop_column("run", "test_dataset")
    op.add_column("rollout_group", sa.Column("majority", JSONB(), nullable=True))
    op.add_column(
        "evaluation",
        sa.Column("evaluation_set", sa.String(), server_default="test", nullable=False),
    )
    op.alter_column("evaluation", "evaluation_set", server_default=None)
    op.add_column("evaluation", sa.Column("majority", JSONB(), nullable=True))
    op.drop_constraint(op.f("pk_evaluation"), "evaluation")
    op.create_primary_key(
        op.f("pk_evaluation"), "evaluation", ["run_id", "version", "evaluation_set"]
    )


def downgrade() -> None:
    op.execute(
        "delete from rollout_group using run, prompt where run.id = rollout_group.run_id"
        " and prompt.id = rollout_group.prompt_id and kind = 'evaluation'"
        f" and prompt.dataset <> test_datasets ->> {_PRIMARY}"
    )
    op.execute(
        "delete from evaluation using run where run.id = evaluation.run_id"
        f" and evaluation_set <> {_PRIMARY}"
    )
    op.drop_constraint(op.f("pk_evaluation"), "evaluation")
    op.create_primary_key(op.f("pk_evaluation"), "evaluation", ["run_id", "version"])
    op.drop_column("evaluation", "majority")
    op.drop_column("evaluation", "evaluation_set")
    op.drop_column("rollout_group", "majority")
    op.add_column("run", sa.Column("test_dataset", sa.String(), nullable=True))
    op.execute(f"update run set test_dataset = test_datasets ->> {_PRIMARY}")
    op.alter_column("run", "test_dataset", nullable=False)
    op.drop_column("run", "test_datasets")
