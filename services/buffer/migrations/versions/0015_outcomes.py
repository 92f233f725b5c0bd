"""Stores what happened to the responses of a group: outcomes, repetitions and cut responses.

Of earlier groups it is known how many responses got no verdict, from the part `failed` of their
rewards, but not whether they crashed or timed out. How many were cut off is in their objects alone.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_OF_GROUPS = """
    update rollout_group set outcomes = (
        select coalesce(jsonb_object_agg(name, count), '{}') from (
            select 'crashed' as name, failed as count union all select 'scored', size - failed
        ) as counts where count > 0
    )
    from (
        select id as of_id, round(coalesce(cast(reward_parts ->> 'failed' as float8), 0) * size)
            ::bigint as failed
        from rollout_group
    ) as known
    where id = of_id
"""


def upgrade() -> None:
    empty = sa.text("'{}'")
    for name in ("outcomes", "repeated"):
        column = sa.Column(name, postgresql.JSONB(), nullable=False, server_default=empty)
        op.add_column("rollout_group", column)
    op.add_column("rollout_group", sa.Column("cut_off", sa.BigInteger(), nullable=True))
    op.execute(_OF_GROUPS)
    for name in ("outcomes", "repeated"):
        op.alter_column("rollout_group", name, server_default=None)


def downgrade() -> None:
    for name in ("cut_off", "repeated", "outcomes"):
        op.drop_column("rollout_group", name)
