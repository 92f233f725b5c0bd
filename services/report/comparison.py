"""Compares variants at equal steps, rollouts, generated tokens and time, on one HTML page."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeAlias

from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation, StepView
from services.report import charts
from services.report.html import figure, page
from services.report.summary import RunHistory, read_history, summarise

STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5% quantiles of Student's t by degrees of freedom, from 1 on; beyond them the normal one is
at most 6% too small."""
NORMAL = 1.960
FEWEST_PAIRS = 3
"""Fewest seeds for which the page shows an interval: with two, Student's t is 12.7."""
TRAINING_CURVES = {
    "gradient_norm": "Gradient norm",
    "entropy": "Entropy of the policy, nats",
    "response_length": "Tokens of a response",
}
"""Titles of the metrics that are drawn over the training steps."""

Variants: TypeAlias = dict[str, list["RunResult"]]
"""The runs of every variant, by its label."""
Spread: TypeAlias = dict[str, float]
MOST_NAMED = 6
"""Most variants that the heading of the page names."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run of a variant."""

    history: RunHistory
    label: str

    @classmethod
    def read(cls, buffer: BufferClient, label: str) -> RunResult:
        return cls(read_history(buffer), label)

    @property
    def seed(self) -> int:
        return self.history.config.seed

    @property
    def final(self) -> Evaluation:
        return self.history.evaluations[-1]

    def spent_at_evaluations(self, cost: Callable[[StepView], float]) -> list[float]:
        """Returns what the steps before each evaluation cost together."""
        total = dict(
            zip(
                (step.step for step in self.history.steps),
                accumulate(map(cost, self.history.steps)),
                strict=True,
            )
        )
        # Version v holds the weights after v - 1 steps.
        return [total.get(evaluation.version - 1, 0.0) for evaluation in self.history.evaluations]

    def accuracy_at(self, cost: Callable[[StepView], float], spent: float) -> float:
        """Returns the held-out accuracy once the steps have cost so much, interpolated linearly."""
        spent_before = self.spent_at_evaluations(cost)
        points = list(zip(spent_before, self.history.evaluations, strict=True))
        for (x0, before), (x1, after) in pairwise(points):
            if x0 <= spent <= x1:
                share = (spent - x0) / max(1e-9, x1 - x0)
                return before.mean_accuracy + share * (after.mean_accuracy - before.mean_accuracy)
        return self.final.mean_accuracy


def _trainer_seconds(step: StepView) -> float:
    return sum(value for name, value in step.metrics.items() if name.startswith("seconds/"))


COSTS: dict[str, Callable[[StepView], float]] = {
    "training steps": lambda step: 1.0,  # noqa: ARG005
    "training responses": lambda step: float(step.rollouts),
    "generated tokens": lambda step: float(step.tokens),
    "seconds of the trainer": _trainer_seconds,
}
"""Costs of a training step, by the name of their axis. Responses and tokens include discarded and
re-evaluated ones; the trainer's time includes waiting for rollouts, and leaves out evaluations and
restarts."""


def write_comparison(results: Sequence[RunResult], directory: Path) -> Path:
    """Writes `comparison.html` and `comparison.json` to `directory`; returns the page's path.

    The differences are those from the first variant.
    """
    directory.mkdir(parents=True, exist_ok=True)
    variants = _by_label(results)
    measures = measures_of(results)
    table, differences = comparison_table(variants, measures), paired_table(variants, measures)
    data = {
        "table": table,
        "differences": differences,
        "runs": [{"label": result.label, **summarise(result.history)} for result in results],
    }
    (directory / "comparison.json").write_text(json.dumps(data) + "\n")
    path = directory / "comparison.html"
    path.write_text(_page(variants, table, differences), encoding="utf-8")
    return path


def _by_label(results: Sequence[RunResult]) -> Variants:
    groups: Variants = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    return groups


Measures: TypeAlias = Mapping[str, Callable[[RunResult], float]]


def measures_of(results: Sequence[RunResult]) -> Measures:
    """Returns what the table shows of a run; equal costs are those of the cheapest run."""
    rollouts, tokens = COSTS["training responses"], COSTS["generated tokens"]
    equal_rollouts, equal_tokens = (
        min(result.spent_at_evaluations(cost)[-1] for result in results)
        for cost in (rollouts, tokens)
    )
    same_steps = len({result.history.config.steps for result in results}) == 1
    return {
        "accuracy at equal steps" if same_steps else "final accuracy": lambda run: (
            run.final.mean_accuracy
        ),
        f"accuracy at {equal_rollouts:,.0f} rollouts": lambda run: run.accuracy_at(
            rollouts, equal_rollouts
        ),
        f"accuracy at {equal_tokens:,.0f} tokens": lambda run: run.accuracy_at(
            tokens, equal_tokens
        ),
        "held-out prompts at 0": lambda run: run.final.bins[0] / run.final.prompts,
        "unlocked": lambda run: run.history.migration.unlocked_fraction,
        "rollouts": lambda run: run.spent_at_evaluations(rollouts)[-1],
        "generated tokens": lambda run: run.spent_at_evaluations(tokens)[-1],
        "seconds of the trainer": lambda run: run.spent_at_evaluations(_trainer_seconds)[-1],
    }


def comparison_table(variants: Variants, measures: Measures) -> dict[str, dict[str, Spread]]:
    """Returns mean, deviation, minimum and maximum over the seeds, by label and measure.

    A single seed has no deviation.
    """
    return {
        label: {name: _spread([measure(run) for run in runs]) for name, measure in measures.items()}
        for label, runs in variants.items()
    }


def paired_table(variants: Variants, measures: Measures) -> dict[str, dict[str, Spread]]:
    """Returns the differences from the first variant with the same seed, by label and measure.

    A variant without a seed in common with the first one has no differences.
    """
    (_, first), *others = variants.items()
    base = {run.seed: run for run in first}
    table: dict[str, dict[str, Spread]] = {}
    for label, runs in others:
        pairs = [(run, base[run.seed]) for run in runs if run.seed in base]
        if pairs:
            table[label] = {
                name: paired_difference([measure(run) - measure(other) for run, other in pairs])
                for name, measure in measures.items()
            }
    return table


def paired_difference(differences: Sequence[float]) -> Spread:
    """Returns the mean of the differences, and their number as `seeds`.

    With more than one there is also `half_width`, half of the 95% confidence interval of the mean
    by Student's t.
    """
    count = len(differences)
    found: Spread = {"mean": statistics.mean(differences), "seeds": count}
    if count > 1:
        quantile = STUDENT_T[count - 2] if count - 2 < len(STUDENT_T) else NORMAL
        found["half_width"] = quantile * statistics.stdev(differences) / math.sqrt(count)
    return found


def _spread(values: Sequence[float]) -> Spread:
    deviation = {"standard_deviation": statistics.stdev(values)} if len(values) > 1 else {}
    return {
        "mean": statistics.mean(values),
        **deviation,
        "lowest": min(values),
        "highest": max(values),
    }


# -- the page


def _page(
    variants: Variants,
    table: dict[str, dict[str, Spread]],
    differences: dict[str, dict[str, Spread]],
) -> str:
    results = [run for runs in variants.values() for run in runs]
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(result.seed for result in results))
    lead = (
        f"{_setting(results)}. Seeds: {seeds}. Lines are means over the seeds; bands span the "
        "minimum to the maximum."
    )
    many = len(variants) > MOST_NAMED
    heading = f"{len(variants)} variants" if many else " · ".join(variants)
    first = next(iter(variants))
    tables = _table("Mean ± standard deviation", table, _spread_cell)
    if differences:
        pairs = max(value["seeds"] for row in differences.values() for value in row.values())
        interval = (
            "mean ± half of the 95% interval"
            if pairs >= FEWEST_PAIRS
            else f"mean; {pairs} seeds are too few for an interval, {FEWEST_PAIRS} are the fewest"
        )
        caption = f"Difference from {first} with the same seed: {interval}"
        tables += _table(caption, differences, _difference_cell)
    return page(
        "bapo comparison",
        f"<h1>{html.escape(heading)}</h1><p class='lead'>{html.escape(lead)}</p>"
        f"{tables}<div class='charts'>{''.join(_figures(variants))}</div>",
    )


def _setting(results: Sequence[RunResult]) -> str:
    """Says what the runs have in common of their steps, models and prompts."""
    configs = [result.history.config for result in results]
    steps = [config.steps for config in configs]
    fewest, most = min(steps), max(steps)
    base = statistics.mean(result.history.evaluations[0].mean_accuracy for result in results)
    same_model = all(config.model.path == configs[0].model.path for config in configs)
    same_prompts = all(config.task == configs[0].task for config in configs)
    model = "the same base model" if same_model else "different base models"
    prompts = f"the same {configs[0].task.train_prompts}" if same_prompts else "different"
    length = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{length} steps from {model} (mean held-out accuracy {base:.3f}) on {prompts} prompts"


def _figures(variants: Variants) -> Iterable[str]:
    for name, cost in COSTS.items():
        curves = {
            label: [
                (
                    run.spent_at_evaluations(cost),
                    [evaluation.mean_accuracy for evaluation in run.history.evaluations],
                )
                for run in runs
            ]
            for label, runs in variants.items()
        }
        yield figure(
            f"Held-out accuracy by {name}",
            f"Variants at an equal number of {name}.",
            charts.bands(curves, x=name, y="held-out accuracy"),
        )
    for metric, title in TRAINING_CURVES.items():
        drawn = _training_curves(variants, metric)
        if drawn:
            yield figure(
                title,
                "Moving mean over training steps; steps without a batch are left out.",
                charts.bands(drawn, x="training step", y=title),
            )
    for label, runs in variants.items():
        yield figure(
            f"{label}: accuracy bins, seed {runs[0].seed}",
            "Share of held-out prompts with k of their n responses correct.",
            charts.bins_over_time(
                [evaluation.version for evaluation in runs[0].history.evaluations],
                [evaluation.bins for evaluation in runs[0].history.evaluations],
            ),
        )


def _training_curves(variants: Variants, metric: str) -> charts.Curves:
    """Returns the metric over the steps of every run, smoothed, by label."""
    curves: dict[str, list[tuple[list[float], list[float]]]] = {}
    for label, runs in variants.items():
        for run in runs:
            points = [
                (float(step.step), step.metrics[metric])
                for step in run.history.steps
                if metric in step.metrics
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                curves.setdefault(label, []).append((list(xs), list(charts.smoothed(ys))))
    return curves


def _table(title: str, table: dict[str, dict[str, Spread]], cell: Callable[[Spread], str]) -> str:
    measures = list(next(iter(table.values())))
    head = "".join(f"<th>{html.escape(measure)}</th>" for measure in measures)
    rows = "".join(
        f"<tr><td>{html.escape(label)}</td>"
        + "".join(f"<td>{cell(values[measure])}</td>" for measure in measures)
        + "</tr>"
        for label, values in table.items()
    )
    return (
        f"<figure class=scrolls><h2>{html.escape(title)}</h2>"
        f"<table><thead><tr><th>variant</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "</figure>"
    )


def _spread_cell(spread: Spread) -> str:
    return _numbers(spread["mean"], spread.get("standard_deviation"), signed=False)


def _difference_cell(difference: Spread) -> str:
    enough = difference["seeds"] >= FEWEST_PAIRS
    return _numbers(
        difference["mean"], difference.get("half_width") if enough else None, signed=True
    )


def _numbers(value: float, around: float | None, *, signed: bool) -> str:
    """Formats `value ± around`, without decimals where the value is large."""
    digits = f",.{0 if max(abs(value), around or 0.0) >= 10 else 3}f"
    text = format(value, f"+{digits}" if signed else digits)
    return text if around is None else f"{text} ± {format(around, digits)}"
