"""The README's first table has the figures of the committed results."""

from __future__ import annotations

from pathlib import Path

from services.reproduction.declarations import find_items
from services.reproduction.states import find_state, read_labelled
from services.reproduction.tables import tabulate

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/reproduction"
README = (ROOT / "README.md").read_text()
(LADDER,) = find_items(["ladder"]).values()


def test_the_table_is_that_of_the_ladder() -> None:
    heads, rows = tabulate(LADDER, read_labelled(LADDER, "small", RESULTS))
    lines = [heads, ["---"] * len(heads), *rows]
    assert "\n".join(f"| {' | '.join(cells)} |" for cells in lines) in README


def test_the_sentences_are_what_the_runs_decide() -> None:
    (result,) = find_state(LADDER, "small", RESULTS).results
    resolution = result.resolution
    assert resolution is not None
    assert f"differences above {resolution.smallest_difference:.3f} are decided" in README
    behind = ["grpo", "grpo with BAPO's loss", "dapo with BAPO's loss", "+ filter"]
    means = result.means
    ahead = [means["+ replays"] - means[label] for label in behind]
    assert all(resolution.is_ahead("+ replays", label) for label in behind)
    assert f"by {min(ahead):.3f} to {max(ahead):.3f}" in README
    assert resolution.is_ahead("+ re-evaluations", "bapo")
    assert f"v = 1 it is {means['+ re-evaluations'] - means['bapo']:.3f} ahead" in README
    assert not resolution.is_ahead("+ replays", "+ re-evaluations")
    assert not resolution.is_ahead("+ re-evaluations", "+ replays")
