"""Records who stopped a run, why and when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

TABLE = "run"


def upgrade() -> None:
    op.add_column(TABLE, sa.Column("stopped_by", sa.String(), nullable=True))
    op.add_column(TABLE, sa.Column("stop_reason", sa.String(), nullable=True))
    op.add_column(TABLE, sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column(TABLE, "stopped_at")
    op.drop_column(TABLE, "stop_reason")
    op.drop_column(TABLE, "stopped_by")
