"""Renames keys whose names did not say what they set."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

RENAMED = (("sampler", "as_of", "posterior_as_of"),)
"""Section, its key, and the key's new name."""


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Renames the keys, and makes `hard_buffer.after` a truth value."""
    for section, old, new in RENAMED:
        _rename(config.get(section), old, new)
    _rename(
        config.get("hard_buffer"), "after", "evict_solved", {"drop_solved": True, "keep": False}
    )
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Restores the names of the keys."""
    for section, old, new in RENAMED:
        _rename(config.get(section), new, old)
    _rename(
        config.get("hard_buffer"), "evict_solved", "after", {True: "drop_solved", False: "keep"}
    )
    return config


def _rename(section: Any, old: str, new: str, values: dict[Any, Any] | None = None) -> None:
    """Renames a key of a section in place, and replaces its value by that of `values`."""
    if isinstance(section, dict) and old in section:
        value = section.pop(old)
        section[new] = value if values is None else values.get(value, value)


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
