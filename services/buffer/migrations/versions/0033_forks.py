"""Adds the run and the step that a run is a fork of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the columns, which are null for the runs that exist."""
    op.add_column("run", sa.Column("parent_id", sa.BigInteger(), nullable=True))
    op.add_column("run", sa.Column("fork_step", sa.BigInteger(), nullable=True))
    op.add_column("run", sa.Column("fork_checkpoint", sa.BigInteger(), nullable=True))
    op.add_column("run", sa.Column("rollouts_until", sa.BigInteger(), nullable=True))
    op.create_foreign_key(op.f("fk_run_parent_id_run"), "run", "run", ["parent_id"], ["id"])
    op.create_index(
        "ix_run_parent_id",
        "run",
        ["parent_id"],
        postgresql_where=sa.text("parent_id is not null"),
    )
    op.create_check_constraint(
        op.f("ck_run_fork"),
        "run",
        "(parent_id is null) = (fork_step is null) and fork_step between 0 and current_step "
        "and fork_checkpoint between 0 and fork_step and rollouts_until > fork_step",
    )


def downgrade() -> None:
    """Removes the columns; forks lose their past."""
    op.drop_constraint(op.f("ck_run_fork"), "run")
    op.drop_index("ix_run_parent_id", "run")
    op.drop_constraint(op.f("fk_run_parent_id_run"), "run")
    for column in ("rollouts_until", "fork_checkpoint", "fork_step", "parent_id"):
        op.drop_column("run", column)
