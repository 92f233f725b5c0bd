"""The example of docs/experiments.md has the figures of the committed results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_core.resolution import Observation, Resolution, resolve

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/experiments.md").read_text()
RUNS = json.loads((ROOT / "benchmarks/results/comparison.json").read_text())["runs"]
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "final accuracy": lambda run: run["evaluation"]["final"]["mean_accuracy"],
    "held-out prompts at 0 of 8": lambda run: (
        run["evaluation"]["final"]["bins"][0] / run["evaluation"]["final"]["prompts"]
    ),
    "unlocked": lambda run: run["unlocked_fraction"],
}


def resolution(name: str) -> Resolution:
    runs = [Observation(run["label"], run["seed"], MEASURES[name](run)) for run in RUNS]
    found = resolve(runs)
    assert found is not None
    return found


@pytest.mark.parametrize("name", MEASURES)
def test_the_table_is_what_the_committed_runs_resolve(name: str) -> None:
    found = resolution(name)
    row = (
        f"| {name} | {found.deviation:.4f} | {found.degrees_of_freedom} | "
        f"{found.smallest_difference:.3f} | {found.seeds_for(0.02)} | {found.seeds_for(0.05)} |"
    )
    assert row in PAGE


def test_the_sentences_are_what_the_committed_runs_decide() -> None:
    accuracy = resolution("final accuracy")
    assert set(accuracy.places().values()) == {(1, 6)}
    largest = accuracy.differences.max()
    pair = accuracy.differences[accuracy.variants.index("dapo"), accuracy.variants.index("grpo")]
    assert pair == largest
    assert f"The largest difference of accuracy is {largest:.3f}, between DAPO and GRPO" in PAGE
    at_zero = resolution("held-out prompts at 0 of 8")
    decided = {(a, b) for a in at_zero.variants for b in at_zero.variants if at_zero.is_ahead(a, b)}
    assert decided == {(a, b) for a in ("grpo", "dapo", "sapo") for b in ("arpo", "maxrl")}
