"""Moves the keys of an objective into the section `loss.objective`, whose `kind` selects it."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

PPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "clip_center": "one"}
"""Keys of `loss` that were those of PPO, and their defaults."""
OTHERS = (
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "topr",
    "m2po",
    "clip_cov",
    "kl_cov",
    "adaptive_clipping",
)
"""Objectives that had a section of `loss`, of their own name."""
OF_ALGORITHMS = {**{name: name for name in OTHERS}, "bapo_adaptive_clipping": "adaptive_clipping"}
"""Algorithms -> their objective, where it is not PPO."""
MOVED = (*PPO, *OTHERS, "options")


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Moves the keys of the objective in force into its section, and drops all others."""
    loss = config.get("loss")
    if not isinstance(loss, dict) or not any(key in loss for key in MOVED):
        return config
    old = {key: loss.pop(key) for key in MOVED if key in loss}
    kind = loss.get("objective") or OF_ALGORITHMS.get(config.get("algorithm", ""), "ppo")
    if kind == "ppo":
        own = {key: old[key] for key in PPO if key in old}
    else:
        own = old.get(kind if kind in OTHERS else "options") or {}
    named = {"kind": kind} if complete or "objective" in loss else {}
    config["loss"] = {"objective": {**named, **own}, **without(loss, "objective")}
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Moves the keys of the section `loss.objective` to where they were."""
    loss = config.get("loss")
    if not isinstance(loss, dict) or not isinstance(loss.get("objective"), dict):
        return config
    objective = loss["objective"]
    kind = objective.get("kind") or OF_ALGORITHMS.get(config.get("algorithm", ""), "ppo")
    own = without(objective, "kind")
    old: dict[str, Any] = {"objective": kind} if complete or "kind" in objective else {}
    if complete:
        old |= {**PPO, **dict.fromkeys(OTHERS), "options": {}}
    if kind == "ppo":
        old |= own
    elif own or complete:
        old[kind if kind in OTHERS else "options"] = own
    config["loss"] = {**old, **without(loss, "objective")}
    return config


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns values without a key."""
    return {name: value for name, value in values.items() if name != key}


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
