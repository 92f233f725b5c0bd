"""Records the decisions and the supervised groups of every batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

TABLE = "step_record"


def upgrade() -> None:
    op.add_column(TABLE, sa.Column("supervised", JSONB(), nullable=True))
    op.add_column(TABLE, sa.Column("decisions", JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column(TABLE, "decisions")
    op.drop_column(TABLE, "supervised")
