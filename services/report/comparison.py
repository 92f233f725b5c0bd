"""Compares algorithms at equal training steps and at equal rollouts, on one HTML page."""

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
class RunResult:
    """A finished run and its wall time in seconds."""

    history: RunHistory
    wall_seconds: float

    @classmethod
    def read(cls, buffer: BufferClient, wall_seconds: float) -> RunResult:
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
        """Number of training responses generated before each evaluation."""
        return [
            sum(step.rollouts for step in self.history.steps if step.step < evaluation.version)
            for evaluation in self.history.evaluations
        ]

    def accuracy_at_rollouts(self, rollouts: int) -> float:
        """Held-out accuracy after `rollouts` training responses, interpolated linearly."""
        points = list(zip(self.rollouts_at, self.history.evaluations, strict=True))
        for (x0, before), (x1, after) in pairwise(points):
            if x0 <= rollouts <= x1:
                share = (rollouts - x0) / max(1, x1 - x0)
                return before.mean_accuracy + share * (after.mean_accuracy - before.mean_accuracy)
        return self.final.mean_accuracy


def write_comparison(results: Sequence[RunResult], directory: Path) -> Path:
    """Writes `comparison.html` and `comparison.json` to `directory`; returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    table = comparison_table(results)
    data = {
        "table": table,
        "runs": [summarise(result.history, result.wall_seconds) for result in results],
    }
    (directory / "comparison.json").write_text(json.dumps(data, indent=2) + "\n")
    path = directory / "comparison.html"
    path.write_text(_page(results, table), encoding="utf-8")
    return path


def comparison_table(results: Sequence[RunResult]) -> dict[str, dict[str, Any]]:
    """Returns mean, standard deviation, minimum and maximum over the seeds, by algorithm and
    measure."""
    equal = min(result.rollouts_at[-1] for result in results)
    measures: dict[str, Callable[[RunResult], float]] = {
        "accuracy at equal steps": lambda result: result.final.mean_accuracy,
        f"accuracy at {equal:,} rollouts": lambda result: result.accuracy_at_rollouts(equal),
        "held-out prompts at 0": lambda result: result.final.bins[0] / result.final.prompts,
        "unlocked": lambda result: result.history.migration.unlocked_fraction,
        "rollouts": lambda result: result.rollouts_at[-1],
        "seconds": lambda result: result.wall_seconds,
    }
    return {
        algorithm: {
            name: _spread([measure(run) for run in runs]) for name, measure in measures.items()
        }
        for algorithm, runs in _by_algorithm(results).items()
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "lowest": min(values),
        "highest": max(values),
    }


def _by_algorithm(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(result)
    return groups


def _page(results: Sequence[RunResult], table: dict[str, dict[str, Any]]) -> str:
    algorithms = _by_algorithm(results)
    first = results[0].history
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(result.seed for result in results))
    base = statistics.mean(result.history.evaluations[0].mean_accuracy for result in results)
    lead = (
        f"{first.config.steps} steps from the same base model (held-out accuracy {base:.3f}) on "
        f"the same {first.config.task.train_prompts} prompts. Seeds: {seeds}. Lines are means over "
        "the seeds; bands span the minimum to the maximum."
    )
    figures = [
        figure(
            "Held-out accuracy by training step",
            "Algorithms at an equal number of training steps.",
            charts.bands(_curves(algorithms, by_rollouts=False), x="training step"),
        ),
        figure(
            "Held-out accuracy by rollouts",
            "Algorithms at an equal number of generated training responses, including discarded "
            "and re-evaluated ones.",
            charts.bands(_curves(algorithms, by_rollouts=True), x="training responses"),
        ),
        *(
            figure(
                f"{algorithm}: accuracy bins, seed {runs[0].seed}",
                "Share of held-out prompts with k of their G responses correct.",
                charts.bins_over_time(
                    [evaluation.version for evaluation in runs[0].history.evaluations],
                    [evaluation.bins for evaluation in runs[0].history.evaluations],
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
    algorithms: dict[str, list[RunResult]], *, by_rollouts: bool
) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Returns (x values, accuracies) of every seed, by algorithm."""
    return {
        algorithm: [
            (
                [float(x) for x in run.rollouts_at]
                if by_rollouts
                else [float(evaluation.version - 1) for evaluation in run.history.evaluations],
                [evaluation.mean_accuracy for evaluation in run.history.evaluations],
            )
            for run in runs
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
