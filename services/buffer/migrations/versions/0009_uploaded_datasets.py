"""Adds what the uploader of a dataset declares: the digest and the source of its prompts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TABLE = "dataset"


def upgrade() -> None:
    op.add_column(TABLE, sa.Column("digest", sa.String(), nullable=True))
    op.add_column(TABLE, sa.Column("source", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column(TABLE, "source")
    op.drop_column(TABLE, "digest")
