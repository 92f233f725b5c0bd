"""Plans the runs of a declaration: a configuration for each variant and seed.

Runs are named after what their declaration says of them, not after the variant, so that
experiments which need the same run share it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bapo_core.config import RunConfig, merge, override_config
from services.model.resolve import BUNDLED_MODELS
from services.reproduction.declarations import Declaration, Size, read_setup

DIGEST_LENGTH = 8
TIME_OF_TWO_AT_A_TIME = 0.62
"""Time of runs that are trained two at a time (`--jobs 2`), as a share of one after another: of 27
runs on two cores without other work (38 minutes). With tests beside them 89 runs took 0.72 (146
minutes). On slower cores, where a run of GRPO alone takes 1.35 times its declared
minutes, 60 runs took 0.94 of these (130 minutes), which is 0.70 of one after another there."""


@dataclass(frozen=True, slots=True)
class DeclaredRun:
    """A run of an experiment: one variant with one seed."""

    label: str
    setup: str
    seed: int
    changes: Mapping[str, Any]
    """Keys that differ from the setup, without the seed."""
    minutes: float
    """Minutes that it takes on two idle cores."""

    @property
    def digest(self) -> str:
        """Digest of what is declared of the run: setup, changes, seed, and a bundled base model.

        The weights of a model that comes with bapo may change under their name.
        """
        setup = read_setup(self.setup)
        values = {
            "setup": dict(setup),
            "changes": self.changes,
            "seed": self.seed,
            "weights": _digest_weights(merge(setup, self.changes)["model"]["path"]),
        }
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def name(self) -> str:
        """Name of the run and of the file with its results."""
        return f"reproduce-{self.setup}-s{self.seed}-{self.digest}"

    def config(self) -> RunConfig:
        """Returns the configuration. Raises `ConfigError` if the declaration gives none."""
        return override_config(
            read_setup(self.setup),
            self.changes,
            {"seed": self.seed, "name": self.name},
            where=f"setup {self.setup}, variant {self.label}",
        )


@cache
def _digest_weights(model: str) -> str | None:
    """Returns the digest of a bundled model's weights; None for another model."""
    directory = BUNDLED_MODELS.get(model)
    if directory is None:
        return None
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def plan_runs(declaration: Declaration, size: Size) -> list[DeclaredRun]:
    """Returns the runs of a declaration, all variants with the first seed first.

    There are none if it has no plan at this size.
    """
    plan = declaration.plan_at(size)
    if plan is None:
        return []
    runs = []
    for seed in plan.seeds:
        prompts = {"task": {"data_seed": seed}} if plan.own_prompts else {}
        shared = merge(plan.overrides, prompts)
        runs += [
            DeclaredRun(label, plan.setup, seed, merge(shared, changes), plan.minutes)
            for label, changes in declaration.variants_at(size).items()
        ]
    return runs


def total_minutes(runs: Iterable[DeclaredRun]) -> float:
    """Returns the minutes of runs, each of which counts once however many experiments share it."""
    return sum({run.name: run.minutes for run in runs}.values())
