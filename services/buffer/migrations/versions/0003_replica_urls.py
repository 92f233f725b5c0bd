"""Adds address and state of rollout replicas, and the version that they should serve."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "run", sa.Column("wanted_version", sa.BigInteger(), nullable=False, server_default="0")
    )
    # Replicas send their heartbeats again within seconds.
    op.execute("delete from replica")
    for name in ("url", "state", "detail", "manifest_digest"):
        op.add_column("replica", sa.Column(name, sa.String(), nullable=False))
    op.add_column("replica", sa.Column("prompts_per_request", sa.BigInteger(), nullable=False))


def downgrade() -> None:
    for name in ("prompts_per_request", "manifest_digest", "detail", "state", "url"):
        op.drop_column("replica", name)
    op.drop_column("run", "wanted_version")
