"""Adds the digest chain of committed steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("step_record", sa.Column("digests", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("step_record", "digests")
