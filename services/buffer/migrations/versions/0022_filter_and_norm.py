"""Leaves the keys of its filter in the section `fresh`, and renames `loss.norm`."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

FRESH = {"gaussian_mean": 0.5, "gaussian_sigma": 0.2, "uniform_fraction": 0.6}
"""Keys of the section `fresh` beside `filter`, and their defaults."""
OF_FILTERS = {
    "gaussian": ("filter", "gaussian_mean", "gaussian_sigma"),
    "uniform": ("filter", "uniform_fraction"),
}
"""Filters that have keys -> the keys."""


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Drops the keys that the filter does not read, and renames the key of the loss.

    No preset has a filter with keys, so that keys without a filter had no effect.
    """
    fresh, loss = config.get("fresh"), config.get("loss")
    if isinstance(fresh, dict):
        read = OF_FILTERS.get(fresh.get("filter", ""), ("filter",))
        config["fresh"] = {key: value for key, value in fresh.items() if key in read}
    if isinstance(loss, dict) and "norm" in loss:
        loss["minibatch_norm"] = loss.pop("norm")
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Completes the section `fresh` of a run, and restores the name of the key of the loss."""
    fresh, loss = config.get("fresh"), config.get("loss")
    if isinstance(fresh, dict) and complete:
        config["fresh"] = {**FRESH, **fresh}
    if isinstance(loss, dict) and "minibatch_norm" in loss:
        loss["norm"] = loss.pop("minibatch_norm")
    return config


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
