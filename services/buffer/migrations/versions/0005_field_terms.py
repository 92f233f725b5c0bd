"""Renames configuration sections, the target version and the spans to the terms of the field."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

SECTIONS = {
    "x1": "fresh",
    "x2": "reevaluate",
    "x3": "replay",
    "bad": "hard_buffer",
    "high": "high_quality_buffer",
    "adaptive": "replay_window",
}
"""Sections of a run's stored configuration: the name before, and the name from here on."""

_RENAME = sa.text(
    "update run set config = (config - cast(:old as text)) "
    "|| jsonb_build_object(cast(:new as text), config -> cast(:old as text)) "
    "where jsonb_exists(config, cast(:old as text))"
)


def _rename_sections(names: dict[str, str]) -> None:
    for old, new in names.items():
        op.get_bind().execute(_RENAME, {"old": old, "new": new})


def upgrade() -> None:
    _rename_sections(SECTIONS)
    op.alter_column("run", "wanted_version", new_column_name="target_version")
    op.rename_table("activity", "span")
    op.alter_column("span", "part", new_column_name="component")
    op.execute("alter index pk_activity rename to pk_span")
    op.execute("alter table span rename constraint fk_activity_run_id_run to fk_span_run_id_run")
    op.execute("alter index ix_activity_run_id_part_step rename to ix_span_run_id_component_step")
    op.execute("alter index ix_activity_run_id_ended_at rename to ix_span_run_id_ended_at")


def downgrade() -> None:
    op.execute("alter index ix_span_run_id_ended_at rename to ix_activity_run_id_ended_at")
    op.execute("alter index ix_span_run_id_component_step rename to ix_activity_run_id_part_step")
    op.execute("alter table span rename constraint fk_span_run_id_run to fk_activity_run_id_run")
    op.execute("alter index pk_span rename to pk_activity")
    op.alter_column("span", "component", new_column_name="part")
    op.rename_table("span", "activity")
    op.alter_column("run", "target_version", new_column_name="wanted_version")
    _rename_sections({new: old for old, new in SECTIONS.items()})
