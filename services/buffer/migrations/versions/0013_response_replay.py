"""Adds members of batches that are parts of groups, and what their responses are chosen by.

Going back makes whole groups of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollout_group", sa.Column("responses", JSONB(), nullable=True))
    op.add_column("batch_member", sa.Column("rows", JSONB(), nullable=True))
    op.add_column(
        "batch_member",
        sa.Column("joins_previous", sa.Boolean(), server_default=sa.false(), nullable=False),
    )


def downgrade() -> None:
    op.drop_column("batch_member", "joins_previous")
    op.drop_column("batch_member", "rows")
    op.drop_column("rollout_group", "responses")
