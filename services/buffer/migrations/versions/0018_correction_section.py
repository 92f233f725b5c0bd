"""Moves the off-policy correction and its weights into the section `loss.correction`."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

WEIGHTS = {
    "weight_cap": 3.0,
    "weight_floor": 0.0,
    "weight_mode": "truncate",
    "weight_norm": "none",
    "weight_level": "token",
}
"""Keys of `loss` that set importance weights, and their defaults."""
WEIGHTED = (
    "bapo",
    "ba_ppo",
    "bapo_mini",
    "bapo_without_x2",
    "bapo_without_x3",
    "bapo_fixed_window",
    "gspo",
    "areal_async",
    "arpo",
)
"""Algorithms whose ratio was `prox_current`; it was `behavior` for all others."""


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Moves the correction into a section, and drops weights where it has none."""
    loss = config.get("loss")
    if not isinstance(loss, dict) or not any(key in loss for key in ("ratio", *WEIGHTS)):
        return config
    ratio = loss.pop("ratio", None)
    weights = {key: loss.pop(key) for key in WEIGHTS if key in loss}
    correction = {} if ratio is None else {"kind": ratio}
    if config.get("algorithm", "bapo") in WEIGHTED if ratio is None else ratio != "behavior":
        correction |= weights
    config["loss"] = {**loss, "correction": correction} if correction else loss
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Moves the keys of the section `loss.correction` to where they were."""
    loss = config.get("loss")
    if not isinstance(loss, dict) or "correction" not in loss:
        return config
    correction = loss.pop("correction")
    section = {"kind": correction} if isinstance(correction, str) else dict(correction)
    named = {"ratio": section.pop("kind")} if "kind" in section else {}
    config["loss"] = {**loss, **named, **(WEIGHTS if complete else {}), **section}
    return config


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
