"""Adds scopes of processes, tokens of one run, tokens that expire, and credentials of replicas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

BEFORE = ("read", "run", "admin")
SCOPES = (*BEFORE, "replica", "collector", "trainer", "pipeline")
CHECK = "ck_api_token_scope"


def _check_scope(scopes: tuple[str, ...]) -> None:
    op.drop_constraint(op.f(CHECK), "api_token", type_="check")
    op.create_check_constraint(
        op.f(CHECK), "api_token", f"scope in ({','.join(map(repr, scopes))})"
    )


def upgrade() -> None:
    _check_scope(SCOPES)
    op.add_column("api_token", sa.Column("run", sa.String(), nullable=True))
    op.add_column("api_token", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column(
        "replica", sa.Column("credential", sa.String(), nullable=False, server_default="")
    )


def downgrade() -> None:
    """Deletes the tokens that an earlier version would take for wider ones."""
    op.execute(
        "delete from api_token where run is not null or expires_at is not null "
        f"or scope not in ({','.join(map(repr, BEFORE))})"
    )
    op.drop_column("replica", "credential")
    op.drop_column("api_token", "expires_at")
    op.drop_column("api_token", "run")
    _check_scope(BEFORE)
