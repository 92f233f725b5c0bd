"""Adds the files of reward functions, by the digests that configurations name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

TABLE = "reward_file"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column(
            "stored_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_reward_file")),
    )


def downgrade() -> None:
    op.drop_table(TABLE)
