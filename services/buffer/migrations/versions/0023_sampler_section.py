"""Leaves the keys of its kind in the section `sampler`."""

from __future__ import annotations

from typing import Any

from services.buffer.config_migrations import rewrite_configs

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

DEFAULTS: dict[str, Any] = {
    "candidates": 4,
    "decay": 1.0,
    "half_life": None,
    "target": 0.5,
    "select": "nearest",
    "band": [0.3, 0.7],
    "temperature": 1e-3,
    "revisited_share": 0.5,
    "revisit_above": 0.35,
    "as_of": "sync",
    "prior_run": None,
}
"""Keys of the section beside `kind`, and their defaults."""
_RESULTS = ("as_of", "prior_run")
_RANKED = ("candidates", "decay", "half_life", "target", *_RESULTS)
READ = {
    "uniform": (),
    "mopps": (*_RANKED, "select", "band"),
    "dots": (*_RANKED, "temperature"),
    "exgrpo": ("revisited_share", "revisit_above", *_RESULTS),
}
"""Built-in samplers -> the keys that they read."""
OF_PLUG_INS = ("options", "decay", "half_life", *_RESULTS)


def nest(config: dict[str, Any], complete: bool) -> dict[str, Any]:  # noqa: ARG001
    """Drops the keys that the sampler does not read, and makes its band null if it selects none."""
    sampler, algorithm = config.get("sampler"), config.get("algorithm", "bapo")
    if not isinstance(sampler, dict):
        return config
    kind = sampler.get("kind", algorithm if algorithm in READ else "uniform")
    read = READ.get(kind, OF_PLUG_INS)
    kept = {key: value for key, value in sampler.items() if key == "kind" or key in read}
    if "select" in kept or "band" in kept:
        select = kept.pop("select", "nearest")
        kept["band"] = kept.get("band", DEFAULTS["band"]) if select == "band" else None
    config["sampler"] = kept
    return config


def flatten(config: dict[str, Any], complete: bool) -> dict[str, Any]:
    """Restores `select`, and completes the section of a run."""
    sampler = config.get("sampler")
    if not isinstance(sampler, dict):
        return config
    if sampler.get("band") is not None:
        sampler["select"] = "band"
    elif "band" in sampler:
        del sampler["band"]
    config["sampler"] = {**(DEFAULTS if complete else {}), **sampler}
    return config


def upgrade() -> None:
    rewrite_configs(nest)


def downgrade() -> None:
    rewrite_configs(flatten)
