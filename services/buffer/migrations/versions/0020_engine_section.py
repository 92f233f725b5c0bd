"""Moves the settings of vLLM into the section `rollout.engine`."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

MOVED = {"dtype": "dtype", "vllm_args": "args", "journal_interval_s": "journal_interval_s"}
"""Keys of `rollout` -> keys of `rollout.engine`."""
DEFAULTS: dict[str, Any] = {"dtype": "auto", "vllm_args": [], "journal_interval_s": None}


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Moves the keys of vLLM into its section, and drops them where another engine is named."""
    rollout = config.get("rollout")
    if not isinstance(rollout, dict) or not any(key in rollout for key in MOVED):
        return config
    kind = rollout.get("engine", "transformers" if complete else None)
    old = {MOVED[key]: rollout.pop(key) for key in MOVED if key in rollout}
    named = {} if kind is None else {"kind": kind}
    rollout["engine"] = named if kind == "transformers" else {**named, **old}
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Moves the keys of the section `rollout.engine` to where they were."""
    rollout = config.get("rollout")
    if not isinstance(rollout, dict) or not isinstance(rollout.get("engine"), dict):
        return config
    engine = rollout.pop("engine")
    if "kind" in engine:
        rollout["engine"] = engine["kind"]
    old = {key: engine[name] for key, name in MOVED.items() if name in engine}
    config["rollout"] = {**rollout, **(DEFAULTS if complete else {}), **old}
    return config


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
