"""Records revisions in `bapo_version` from here on, and not in `alembic_version`.

The schema stays as it is: `services.buffer.version_table` renames the table, in both directions.
"""

from __future__ import annotations

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Changes nothing in the schema."""


def downgrade() -> None:
    """Changes nothing in the schema."""
