"""Stores the lowest and the highest reward of a group, which tell whether its rewards differ.

Of earlier groups they are in their objects alone, so they stay null: such groups count as mixed by
their correct responses, as they did when they were stored.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("lowest_reward", "highest_reward"):
        op.add_column("rollout_group", sa.Column(name, sa.Float(), nullable=True))


def downgrade() -> None:
    for name in ("highest_reward", "lowest_reward"):
        op.drop_column("rollout_group", name)
