"""Turns response replay on and off by `response_replay.groups`, and renames its candidates."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

DEFAULTS: dict[str, Any] = {
    "enabled": False,
    "groups": "all",
    "cache": 16,
    "min_cache": 16,
    "count": 8,
    "only_correct": False,
    "strategy": "recent",
    "advantages": "split",
    "replace": False,
}
RENAMED = {"cache": "candidates", "min_cache": "min_candidates"}
REPLAYING = ("repo", "arpo", "exgrpo")
"""Algorithms that replay responses."""


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Replaces `enabled`, and drops all other keys where it is false."""
    replay = config.get("response_replay")
    if not isinstance(replay, dict):
        return config
    on = replay.pop("enabled", None)
    if on is False:
        config["response_replay"] = {"groups": "off"}
    elif on is None and config.get("algorithm") not in REPLAYING:
        del config["response_replay"]  # these keys had no effect
    else:
        kept = {RENAMED.get(key, key): value for key, value in replay.items()}
        config["response_replay"] = ({"groups": "all"} if on else {}) | kept
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Restores `enabled` and the names of the keys."""
    replay = config.get("response_replay")
    if isinstance(replay, str) or replay is False:
        replay = {"groups": replay or "off"}
    if not isinstance(replay, dict):
        return config
    names = {new: old for old, new in RENAMED.items()}
    old = {names.get(key, key): value for key, value in replay.items()}
    if old.get("groups") == "off":
        old = {"enabled": False}
    elif "groups" in old:
        old["enabled"] = True
    config["response_replay"] = {**(DEFAULTS if complete else {}), **old}
    return config


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
