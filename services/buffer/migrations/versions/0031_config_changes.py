"""Adds the changes of a run's configuration, and the time at which its attempt began."""

from __future__ import annotations

import json
from functools import reduce

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "run",
        sa.Column(
            "config_changes", postgresql.JSONB(), nullable=False, server_default=sa.text("'[]'")
        ),
    )
    op.add_column("run", sa.Column("attempt_began_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Keeps the last values alone, with which an older version continues the run."""
    connection = op.get_bind()
    runs = connection.execute(sa.text("select id, config, config_changes from run")).all()
    for identifier, config, changes in runs:
        for change in changes:
            for key, value in change["new"].items():
                *sections, name = key.split(".")
                reduce(lambda values, section: values[section], sections, config)[name] = value
        if changes:
            connection.execute(
                sa.text("update run set config = cast(:config as jsonb) where id = :id"),
                {"id": identifier, "config": json.dumps(config)},
            )
    op.drop_column("run", "attempt_began_at")
    op.drop_column("run", "config_changes")
