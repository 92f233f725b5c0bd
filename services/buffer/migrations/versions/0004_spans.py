"""Adds the spans of a run: what each component did and when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "activity",
        sa.Column(
            "run_id",
            sa.BigInteger(),
            sa.ForeignKey("run.id", name="fk_activity_run_id_run", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("part", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "key", name="pk_activity"),
    )
    op.create_index("ix_activity_run_id_part_step", "activity", ["run_id", "part", "step"])
    op.create_index("ix_activity_run_id_ended_at", "activity", ["run_id", "ended_at"])


def downgrade() -> None:
    op.drop_table("activity")
