"""One page that compares algorithms, at equal training steps and at equal rollouts."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation
from services.report import charts
from services.report.html import figure, page
from services.report.summary import RunHistory, read_history, summarise


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run and how long it took, in seconds."""

    history: RunHistory
    wall_seconds: float

    @classmethod
    def read(cls, buffer: BufferClient, wall_seconds: float) -> Outcome:
        return cls(read_history(buffer), wall_seconds)

    @property
    def algorithm(self) -> str:
        return self.history.config.algorithm

    @property
    def seed(self) -> int:
        return self.history.config.seed

    @property
    def final(self) -> Evaluation:
        return self.history.evaluations[-1]

    @property
    def rollouts_at(self) -> list[int]:
        """Training responses generated before each evaluation."""
        return [
            sum(step.rollouts for step in self.history.steps if step.step < evaluation.version)
            for evaluation in self.history.evaluations
        ]

    def accuracy_at_rollouts(self, rollouts: int) -> float:
        """Held-out accuracy after `rollouts` training responses, between evaluations by a line."""
        points = list(zip(self.rollouts_at, self.history.evaluations, strict=True))
        for (x0, before), (x1, after) in pairwise(points):
            if x0 <= rollouts <= x1:
                share = (rollouts - x0) / max(1, x1 - x0)
                return before.mean_accuracy + share * (after.mean_accuracy - before.mean_accuracy)
        return self.final.mean_accuracy


def write_comparison(outcomes: Sequence[Outcome], directory: Path) -> Path:
    """`comparison.html` and `comparison.json` in `directory`; returns the former."""
    directory.mkdir(parents=True, exist_ok=True)
    table = comparison_table(outcomes)
    data = {
        "table": table,
        "runs": [summarise(each.history, each.wall_seconds) for each in outcomes],
    }
    (directory / "comparison.json").write_text(json.dumps(data, indent=2) + "\n")
    path = directory / "comparison.html"
    path.write_text(_page(outcomes, table), encoding="utf-8")
    return path


def comparison_table(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """For each algorithm and measure: mean, lowest and highest over the seeds."""
    equal = min(outcome.rollouts_at[-1] for outcome in outcomes)
    measures: dict[str, Callable[[Outcome], float]] = {
        "accuracy at equal steps": lambda each: each.final.mean_accuracy,
        f"accuracy at {equal:,} rollouts": lambda each: each.accuracy_at_rollouts(equal),
        "held-out prompts at 0": lambda each: each.final.bins[0] / each.final.prompts,
        "unlocked": lambda each: each.history.migration.unlocked_fraction,
        "rollouts": lambda each: each.rollouts_at[-1],
        "seconds": lambda each: each.wall_seconds,
    }
    return {
        algorithm: {
            name: _spread([measure(each) for each in runs]) for name, measure in measures.items()
        }
        for algorithm, runs in _by_algorithm(outcomes).items()
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "lowest": min(values),
        "highest": max(values),
    }


def _by_algorithm(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.algorithm, []).append(outcome)
    return found


def _page(outcomes: Sequence[Outcome], table: dict[str, dict[str, Any]]) -> str:
    algorithms = _by_algorithm(outcomes)
    first = outcomes[0].history
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(each.seed for each in outcomes))
    base = statistics.mean(each.history.evaluations[0].mean_accuracy for each in outcomes)
    lead = (
        f"{first.config.steps} steps from the same base model (held-out accuracy {base:.3f}) on "
        f"the same {first.config.task.train_prompts} prompts. Seeds: {seeds}. Lines are means over "
        "the seeds, bands span the lowest to the highest."
    )
    figures = [
        figure(
            "Held-out accuracy by training step",
            "At an equal number of updates of the trainer's batches.",
            charts.bands(_curves(algorithms, by_rollouts=False), x="training step"),
        ),
        figure(
            "Held-out accuracy by rollouts",
            "By training responses generated, discarded and re-evaluated ones included.",
            charts.bands(_curves(algorithms, by_rollouts=True), x="training responses"),
        ),
        *(
            figure(
                f"{algorithm}: accuracy bins, seed {runs[0].seed}",
                "Held-out prompts by how many of their responses are correct.",
                charts.bins_over_time(
                    [each.version for each in runs[0].history.evaluations],
                    [each.bins for each in runs[0].history.evaluations],
                ),
            )
            for algorithm, runs in algorithms.items()
        ),
    ]
    return page(
        "bapo comparison",
        f"<h1>{html.escape(' · '.join(algorithms))}</h1><p class='lead'>{html.escape(lead)}</p>"
        f"{_table(table)}<div class='charts'>{''.join(figures)}</div>",
    )


def _curves(
    algorithms: dict[str, list[Outcome]], *, by_rollouts: bool
) -> dict[str, list[tuple[list[float], list[float]]]]:
    """For each algorithm, each seed's (x, accuracy)."""
    return {
        algorithm: [
            (
                [float(x) for x in each.rollouts_at]
                if by_rollouts
                else [float(evaluation.version - 1) for evaluation in each.history.evaluations],
                [evaluation.mean_accuracy for evaluation in each.history.evaluations],
            )
            for each in runs
        ]
        for algorithm, runs in algorithms.items()
    }


def _table(table: dict[str, dict[str, Any]]) -> str:
    measures = list(next(iter(table.values())))
    head = "".join(f"<th>{html.escape(measure)}</th>" for measure in measures)
    rows = "".join(
        f"<tr><td>{html.escape(algorithm)}</td>"
        + "".join(f"<td>{_cell(values[measure])}</td>" for measure in measures)
        + "</tr>"
        for algorithm, values in table.items()
    )
    return (
        f"<figure><table><thead><tr><th>mean ± standard deviation</th>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></figure>"
    )


def _cell(spread: dict[str, float]) -> str:
    if spread["mean"] >= 10:
        return f"{spread['mean']:,.0f} ± {spread['standard_deviation']:,.0f}"
    return f"{spread['mean']:.3f} ± {spread['standard_deviation']:.3f}"
