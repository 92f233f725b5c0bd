"""Separates the accuracy of groups, k/G, from their mean reward, which may be any number now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# Rewards were 0 or 1 so far: their mean is the accuracy. `bins` has the number of groups with k of
# G correct, for k = 0..G.
_OF_STEPS = """
    update step_record set mean_reward = coalesce(
        (select sum((bin.number - 1) * bin.groups::bigint)
            / nullif(sum(bin.groups::bigint) * (count(*) - 1), 0)
         from jsonb_array_elements_text(bins) with ordinality as bin(groups, number)), 0)
"""


def upgrade() -> None:
    op.alter_column("rollout_group", "mean_reward", new_column_name="accuracy")
    op.alter_column("buffer_entry", "mean_reward", new_column_name="accuracy")
    for table, values in (
        ("rollout_group", "update rollout_group set mean_reward = accuracy"),
        ("step_record", _OF_STEPS),
    ):
        op.add_column(table, sa.Column("mean_reward", sa.Double(), nullable=True))
        op.add_column(table, sa.Column("reward_parts", postgresql.JSONB(), nullable=True))
        op.execute(values)
        op.execute(f"update {table} set reward_parts = jsonb_build_object('answer', mean_reward)")
        op.alter_column(table, "mean_reward", nullable=False)
        op.alter_column(table, "reward_parts", nullable=False)


def downgrade() -> None:
    for table in ("step_record", "rollout_group"):
        op.drop_column(table, "reward_parts")
        op.drop_column(table, "mean_reward")
    op.alter_column("buffer_entry", "accuracy", new_column_name="mean_reward")
    op.alter_column("rollout_group", "accuracy", new_column_name="mean_reward")
