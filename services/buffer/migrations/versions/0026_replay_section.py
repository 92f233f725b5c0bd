"""Moves the high-quality buffer and the replay window into the section `replay`, of three kinds."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

REPLAY: dict[str, Any] = {"enabled": True, "select": "window", "last_step": None}
BUFFER = {"capacity": 256, "max_age": 3}
WINDOW: dict[str, Any] = {
    "direction": "eq8",
    "c2_range": [0.125, 0.5],
    "c3_range": [0.25, 0.625],
    "r_tot": "batch",
    "ema_decay": 0.9,
}
"""Keys of the three sections, and their defaults."""
MIXED = ("dots", "remix_grpo")
WINDOWED = ("bapo", "ba_ppo", "bapo_mini", "bapo_without_x2", "bapo_fixed_window")
"""Algorithms that replay groups; no others do."""


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Joins the sections of replay, and drops what the kind of replay does not read."""
    algorithm = config.get("algorithm", "bapo")
    stored_replay = config.get("replay")
    replay: dict[str, Any] = stored_replay if isinstance(stored_replay, dict) else {}
    sections = (config.pop("high_quality_buffer", None), config.pop("replay_window", None))
    hard = config.get("hard_buffer")
    stored = hard.pop("store_new_in_high", None) if isinstance(hard, dict) else None
    if hard == {}:
        del config["hard_buffer"]
    if not replay and sections == (None, None) and stored is None:
        return config
    of_preset = "mixed" if algorithm in MIXED else "window" if algorithm in WINDOWED else "off"
    enabled = replay.get("enabled", of_preset != "off")
    select = replay.get("select", "window" if of_preset == "off" else of_preset)
    kind = select if enabled else "off"
    named = "enabled" in replay or "select" in replay
    section: dict[str, Any] = {"select": kind} if named else {}
    if kind != "off":
        section |= {key: replay[key] for key in ("last_step",) if key in replay}
        section |= {} if stored is None else {"store_reevaluated": stored}
        section |= {"buffer": sections[0]} if sections[0] else {}
        if kind == "window" and sections[1]:
            window = dict(sections[1])
            if window.get("direction") in ("off", False):
                window["direction"] = "fixed"
            section["window"] = window
    config.pop("replay", None)
    return {**config, "replay": section} if section else config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Divides the section `replay` into the sections that it was made of."""
    replay = config.get("replay")
    if isinstance(replay, str) or replay is False:
        replay = {"select": replay or "off"}
    if not isinstance(replay, dict):
        return config
    section = dict(replay)
    sections = {
        "high_quality_buffer": section.pop("buffer", {}),
        "replay_window": _unfix(section.pop("window", {})),
        "hard_buffer": dict(config.get("hard_buffer") or {}),
    }
    if complete or "store_reevaluated" in section:
        sections["hard_buffer"]["store_new_in_high"] = section.pop("store_reevaluated", False)
    sections["replay"] = _enable(section)
    if complete:
        defaults = {"replay": REPLAY, "high_quality_buffer": BUFFER, "replay_window": WINDOW}
        for name, values in defaults.items():
            sections[name] = {**values, **sections[name]}
    del config["replay"]
    return {**config, **{name: values for name, values in sections.items() if values}}


def _enable(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the section `replay` with `enabled` in place of the kind `off`."""
    if section.get("select") in ("off", False):
        return {"enabled": False}
    return {**section, "enabled": True} if "select" in section else section


def _unfix(window: dict[str, Any]) -> dict[str, Any]:
    """Returns a replay window whose direction is `off` in place of `fixed`."""
    return {**window, "direction": "off"} if window.get("direction") == "fixed" else window


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
