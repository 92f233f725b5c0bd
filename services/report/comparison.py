"""Compares variants at equal steps, rollouts, generated tokens and time, on one HTML page."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from bapo_core.comparison import LAST_EVALUATIONS, Curve, cheapest_curve, choose_measure
from bapo_core.config.rollouts import EvaluationMeasure
from bapo_core.resolution import (
    FEWEST_PAIRS,
    Observation,
    Resolution,
    format_places,
    paired_difference,
    resolve,
)
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation, StepView
from services.report import charts
from services.report.html import figure, page
from services.report.summary import RunHistory, read_history, summarise

PLANNED_DIFFERENCES = (0.01, 0.02, 0.05, 0.1)
"""True differences for which a comparison states the number of seeds."""
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

    def values(self, what: EvaluationMeasure) -> list[float]:
        """Returns the mean accuracy, or the mean reward, of each evaluation."""
        return [
            evaluation.mean_reward if what == "reward" else evaluation.mean_accuracy
            for evaluation in self.history.evaluations
        ]

    def curve(self, what: EvaluationMeasure, cost: Callable[[StepView], float]) -> Curve:
        """Returns the accuracy, or the reward, over what the steps before an evaluation cost."""
        return Curve(self.spent_at_evaluations(cost), self.values(what))


def evaluation_measure_of(results: Sequence[RunResult]) -> EvaluationMeasure:
    """Returns what runs are compared by: the accuracy, or the reward (`choose_measure`)."""
    return choose_measure(
        [result.history.config.task.measure for result in results],
        [value for result in results for value in result.values("accuracy")],
        [value for result in results for value in result.values("reward")],
    )


def _trainer_seconds(step: StepView) -> float:
    return sum(value for name, value in step.metrics.items() if name.startswith("seconds/"))


UNITS = {
    "training steps": "steps",
    "training responses": "rollouts",
    "generated tokens": "tokens",
    "seconds of the trainer": "seconds of the trainer",
}
"""Units of the costs at which accuracies are compared, by their names."""

END = "the end of each run"
"""Name of the cost of a whole run, whatever it was."""

COSTS: dict[str, Callable[[StepView], float]] = {
    "training steps": lambda step: 1.0,  # noqa: ARG005
    "training responses": lambda step: float(step.rollouts),
    "generated tokens": lambda step: float(step.tokens),
    "seconds of the trainer": _trainer_seconds,
}
"""Costs of a training step, by the name of their axis. Responses and tokens include discarded and
re-evaluated ones; the trainer's time includes waiting for rollouts, and leaves out evaluations and
restarts."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Curves and results of a run, as a comparison shows them."""

    name: str
    of: Callable[[RunResult], float]
    higher_is_better: bool | None = None
    """None for a measure by which variants get no places: what a run costs."""


def write_comparison(results: Sequence[RunResult], directory: Path) -> Path:
    """Writes `comparison.html` and `comparison.json` to `directory`; returns the page's path.

    The differences are those from the first variant.
    """
    directory.mkdir(parents=True, exist_ok=True)
    variants = group_by_label(results)
    measures = measures_of(results)
    table, differences = comparison_table(variants, measures), paired_table(variants, measures)
    decisions = decide(variants, measures)
    data = {
        "table": table,
        "differences": differences,
        "resolution": decisions,
        "runs": [
            {"label": result.label, **summarise(result.history), "evaluations": _curve(result)}
            for result in results
        ],
    }
    (directory / "comparison.json").write_text(json.dumps(data) + "\n")
    path = directory / "comparison.html"
    path.write_text(_page(variants, table, differences, decisions), encoding="utf-8")
    return path


def _curve(result: RunResult) -> list[dict[str, float]]:
    """Returns accuracy and reward of every evaluation, and what the steps before it cost."""
    spent = {name: result.spent_at_evaluations(cost) for name, cost in COSTS.items()}
    return [
        {
            "accuracy": evaluation.mean_accuracy,
            "reward": evaluation.mean_reward,
            **{name: values[index] for name, values in spent.items()},
        }
        for index, evaluation in enumerate(result.history.evaluations)
    ]


def group_by_label(results: Sequence[RunResult]) -> Variants:
    groups: Variants = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    return groups


def measures_of(results: Sequence[RunResult]) -> list[Measure]:
    """Returns what the table shows of a run.

    An accuracy, or a reward in its place (`evaluation_measure_of`), is the mean of the last four
    evaluations of the run that costs least, and of what the curves of the others are at the same
    costs. The best checkpoint is that of the evaluations which cost no more than this run. Between
    runs of different numbers of steps, the last evaluations of each run come first.
    """
    scores = scores_of(results).values()
    return [
        *(score for score, _ in scores),
        *(best for _, best in scores),
        Measure("held-out prompts at 0", lambda run: run.final.bins[0] / run.final.prompts, False),
        Measure("unlocked", lambda run: run.history.migration.unlocked_fraction, True),
        Measure("rollouts", _total(COSTS["training responses"])),
        Measure("generated tokens", _total(COSTS["generated tokens"])),
        Measure("seconds of the trainer", _total(_trainer_seconds)),
    ]


def scores_of(results: Sequence[RunResult]) -> dict[str, tuple[Measure, Measure]]:
    """Returns the accuracy, or the reward, and the best checkpoint of a run, by their cost.

    Between runs of different numbers of steps the first cost is `END`: the whole run.
    """
    what = evaluation_measure_of(results)
    same_steps = len({result.history.config.steps for result in results}) == 1
    own_steps = COSTS["training steps"]
    scores = {}
    if not same_steps:
        scores[END] = (
            Measure(f"final {what}", _final(what, own_steps), True),
            Measure("best checkpoint", lambda run: max(run.values(what)), True),
        )
    for name, cost in COSTS.items():
        costs = cheapest_curve([result.curve(what, cost) for result in results]).last_costs
        point = f"{costs[-1]:,.0f} {UNITS[name]}"
        if cost is own_steps and same_steps:
            point = "equal steps"
        scores[name] = (
            Measure(f"{what} at {point}", _mean_at(what, cost, costs), True),
            Measure(f"best checkpoint at {point}", _best_at(what, cost, costs[-1]), True),
        )
    return scores


def explained_scores_of(results: Sequence[RunResult]) -> list[tuple[Measure, Measure]]:
    """Returns the scores whose resolution a comparison explains: at equal steps, or at the end of
    runs of different lengths, and at equal generated tokens."""
    scores = scores_of(results)
    return [next(iter(scores.values())), scores["generated tokens"]]


def _final(
    what: EvaluationMeasure, cost: Callable[[StepView], float]
) -> Callable[[RunResult], float]:
    def final(run: RunResult) -> float:
        curve = run.curve(what, cost)
        return curve.mean_at(curve.last_costs)

    return final


def _mean_at(
    what: EvaluationMeasure, cost: Callable[[StepView], float], costs: Sequence[float]
) -> Callable[[RunResult], float]:
    return lambda run: run.curve(what, cost).mean_at(costs)


def _best_at(
    what: EvaluationMeasure, cost: Callable[[StepView], float], spent: float
) -> Callable[[RunResult], float]:
    return lambda run: run.curve(what, cost).best_within(spent)


def _total(cost: Callable[[StepView], float]) -> Callable[[RunResult], float]:
    return lambda run: run.spent_at_evaluations(cost)[-1]


Decisions: TypeAlias = dict[str, dict[str, Any] | None]
"""Decisions and places by the name of the measure; None for a measure that nothing decides."""


def decide(variants: Variants, measures: Sequence[Measure]) -> Decisions:
    """Returns, for each measure with places, what the runs decide of it.

    `standard_deviation` is that of repetitions of one run, with its `degrees_of_freedom`,
    `smallest_difference` the difference from which on every pair of variants is decided, and
    `seeds_for` the seeds that differences need. `places` has the best and the worst place of each
    variant, and `ahead_of` the variants that it is decided to be better than.
    """
    decisions: Decisions = {}
    for measure in measures:
        if measure.higher_is_better is None:
            continue
        observations = [
            Observation(label, run.seed, measure.of(run))
            for label, runs in variants.items()
            for run in runs
        ]
        resolution = resolve(observations)
        decisions[measure.name] = (
            None
            if resolution is None
            else _describe(resolution, higher_is_better=measure.higher_is_better)
        )
    return decisions


def _describe(resolution: Resolution, *, higher_is_better: bool) -> dict[str, Any]:
    variants = resolution.variants
    ahead = {
        label: [other for other in variants if resolution.is_ahead(label, other)]
        for label in variants
    }
    if not higher_is_better:
        ahead = {label: [o for o in variants if label in ahead[o]] for label in variants}
    smallest = resolution.smallest_difference
    return {
        "standard_deviation": resolution.deviation,
        "degrees_of_freedom": resolution.degrees_of_freedom,
        # JSON has no infinity: a pair of variants without a common seed is never decided.
        "smallest_difference": smallest if math.isfinite(smallest) else None,
        "seeds_for": {str(each): resolution.seeds_for(each) for each in PLANNED_DIFFERENCES},
        "places": resolution.places(higher_is_better=higher_is_better),
        "ahead_of": ahead,
    }


def explain_decision(decision: dict[str, Any] | None) -> str:
    """Says in a few sentences what the runs decide of a measure."""
    if decision is None:
        return (
            "With one variant, or with one seed each, nothing shows how far repetitions of a run "
            "differ: no variant has a place. Two seeds are the fewest, four or more decide more."
        )
    smallest, variants = decision["smallest_difference"], decision["places"]
    pairs = math.comb(len(variants), 2)
    decided = (
        "Two variants have no seed in common, so that nothing decides between them."
        if smallest is None
        else f"Differences above {smallest:.3f} are decided (95% for "
        f"{'the pair' if pairs == 1 else f'all {pairs} pairs together'})."
    )
    seeds = ", ".join(f"{size} takes {count}" for size, count in decision["seeds_for"].items())
    freedom = decision["degrees_of_freedom"]
    return (
        f"Repetitions of a run differ by {decision['standard_deviation']:.4f} (standard deviation, "
        f"{freedom} degree{'' if freedom == 1 else 's'} of freedom). {decided} Seeds that decide a "
        f"true difference in 4 of 5 cases: {seeds}."
    )


def _explain(decisions: Decisions, scores: Sequence[Measure]) -> list[str]:
    """Returns what the runs decide of each score, or once that nothing is decided of any."""
    if not any(decisions[score.name] for score in scores):
        return [explain_decision(None)]
    return [
        f"{score.name.capitalize()}: {explain_decision(decisions[score.name])}" for score in scores
    ]


def show_places(decision: dict[str, Any] | None, label: str) -> str:
    """Returns the places that a variant may have, such as `1-3`, or `-` if nothing is decided."""
    if decision is None:
        return "-"
    return format_places(decision["places"][label])


def comparison_table(
    variants: Variants, measures: Sequence[Measure]
) -> dict[str, dict[str, Spread]]:
    """Returns mean, deviation, minimum and maximum over the seeds, by label and measure.

    A single seed has no deviation.
    """
    return {
        label: {each.name: _spread([each.of(run) for run in runs]) for each in measures}
        for label, runs in variants.items()
    }


def paired_table(variants: Variants, measures: Sequence[Measure]) -> dict[str, dict[str, Spread]]:
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
                each.name: paired_difference(
                    [each.of(run) - each.of(other) for run, other in pairs]
                )
                for each in measures
            }
    return table


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
    decisions: Decisions,
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
    tables += _places_table(decisions)
    tables += (
        f"<p>Each {evaluation_measure_of(results)} is the mean of the last {LAST_EVALUATIONS} "
        "evaluations.</p>"
    )
    for explanation in _explain(decisions, [score for score, _ in explained_scores_of(results)]):
        tables += f"<p>{html.escape(explanation)}</p>"
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
    what = evaluation_measure_of(results)
    base = statistics.mean(result.values(what)[0] for result in results)
    same_model = all(config.model.path == configs[0].model.path for config in configs)
    same_prompts = all(config.task == configs[0].task for config in configs)
    model = "the same base model" if same_model else "different base models"
    prompts = f"the same {configs[0].task.train_prompts}" if same_prompts else "different"
    length = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{length} steps from {model} (mean held-out {what} {base:.3f}) on {prompts} prompts"


def _figures(variants: Variants) -> Iterable[str]:
    what = evaluation_measure_of([run for runs in variants.values() for run in runs])
    for name, cost in COSTS.items():
        curves = {
            label: [(run.spent_at_evaluations(cost), run.values(what)) for run in runs]
            for label, runs in variants.items()
        }
        yield figure(
            f"Held-out {what} by {name}",
            f"Variants at an equal number of {name}.",
            charts.bands(curves, x=name, y=f"held-out {what}"),
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


def _places_table(decisions: Decisions) -> str:
    decided = {name: each for name, each in decisions.items() if each is not None}
    if not decided:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in decided)
    labels = next(iter(decided.values()))["places"]
    rows = "".join(
        f"<tr><td>{html.escape(label)}</td>"
        + "".join(f"<td>{show_places(each, label)}</td>" for each in decided.values())
        + "</tr>"
        for label in labels
    )
    smallest = "".join(
        f"<td>{'-' if value is None else f'{value:.3f}'}</td>"
        for value in (each["smallest_difference"] for each in decided.values())
    )
    return (
        "<figure class=scrolls><h2>Places that the runs leave open (95% for all of a column)</h2>"
        f"<table><thead><tr><th>variant</th>{head}</tr></thead><tbody>{rows}"
        f"<tr><td>smallest difference that is decided</td>{smallest}</tr></tbody></table></figure>"
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
