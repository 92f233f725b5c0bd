"""Adds the posteriors of prompts that adaptive samplers draw by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

TABLE = "sampler_posterior"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("a", sa.Double(), nullable=False),
        sa.Column("b", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_sampler_posterior_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(
            "run_id",
            "position",
            "step",
            name=op.f("pk_sampler_posterior"),
            postgresql_include=["a", "b"],
        ),
    )


def downgrade() -> None:
    op.drop_table(TABLE)
