"""Adds the queue of runs, the workflow that trains a run, and stored configurations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLE, CONSTRAINT = "run", "ck_run_status"
STATUSES = "'created','running','paused','stopped','finished','failed','deleting'"


def upgrade() -> None:
    op.add_column(TABLE, sa.Column("workflow", sa.String(), nullable=True))
    op.add_column(TABLE, sa.Column("queued_at", sa.DateTime(timezone=True), nullable=True))
    op.drop_constraint(op.f(CONSTRAINT), TABLE)
    op.create_check_constraint(op.f(CONSTRAINT), TABLE, f"status in ({STATUSES},'queued')")
    op.create_table(
        "stored_config",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column(
            "stored_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_stored_config")),
    )


def downgrade() -> None:
    op.drop_table("stored_config")
    # A queued run trains nothing yet, and the version before continues stopped runs.
    op.execute("update run set status = 'stopped', attempt = attempt + 1 where status = 'queued'")
    op.drop_constraint(op.f(CONSTRAINT), TABLE)
    op.create_check_constraint(op.f(CONSTRAINT), TABLE, f"status in ({STATUSES})")
    op.drop_column(TABLE, "queued_at")
    op.drop_column(TABLE, "workflow")
