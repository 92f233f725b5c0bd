"""Leaves the keys of its estimator in the section `advantage`, and moves the critic there."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

DEFAULTS = {
    "scale": "group",
    "std": "population",
    "eps": 1e-6,
    "gamma": 1.0,
    "lam": 1.0,
    "whiten": True,
}
CRITIC = {"learning_rate": 1e-5, "clip": 0.5}
KEYS = {
    "group": ("scale", "std", "eps"),
    "gae": ("gamma", "lam", "whiten"),
    "reinforce_pp": ("gamma",),
    "maxrl": ("eps",),
}
"""Estimators -> the keys that they read."""
OF_ALGORITHMS = {
    "ba_ppo": "gae",
    "ppo": "gae",
    "rloo": "rloo",
    "reinforce_pp": "reinforce_pp",
    "opo": "opo",
    "maxrl": "maxrl",
}
"""Algorithms -> their estimator, where it is not `group`."""


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Drops the keys that the estimator does not read, and moves the section `critic`."""
    critic, advantage = config.pop("critic", None), config.get("advantage")
    if critic is None and not isinstance(advantage, dict):
        return config
    old = dict(advantage) if isinstance(advantage, dict) else {}
    estimator = old.get("estimator") or OF_ALGORITHMS.get(config.get("algorithm", ""), "group")
    section = {key: old[key] for key in ("estimator", *KEYS.get(estimator, ())) if key in old}
    if critic and estimator == "gae":
        section["critic"] = critic
    if section or advantage:
        config["advantage"] = section
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Moves the critic back to its own section, and completes both sections of a run."""
    advantage = config.get("advantage")
    if not isinstance(advantage, dict):
        return config
    critic = advantage.pop("critic", None)
    if complete:
        config["advantage"] = {**DEFAULTS, **advantage}
        config["critic"] = critic or CRITIC
    elif critic is not None:
        config["critic"] = critic
    return config


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
