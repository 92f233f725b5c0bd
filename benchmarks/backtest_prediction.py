"""Measures how well a back-test predicts training: rank correlations over rule sets and seeds.

    BAPO_HOME=DIRECTORY python -m benchmarks.backtest_prediction

Trains every rule set with every seed, the way `bapo compare` does, on the stack in DIRECTORY, and
back-tests all rule sets on the run of each seed that has the default rules. The same command
continues after an interruption; the results are written after each run.

For a figure of the back-test, such as the sum of mu (1 - mu) over a batch, the rank correlation
(Spearman) is between the figure of each rule set, on the run of one seed, and the accuracy that
training with the rule set reached, on average over the other seeds: the back-test knows nothing of
the runs that it predicts. The noise ceiling is the same correlation with the accuracy that training
with the first seed reached in the place of the figure: nothing that is measured on one run can be
expected to predict better than a training does.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_core.comparison import Curve, cheapest_curve
from bapo_core.resolution import Observation, resolve
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api.client import BufferClient
from services.cli.commands.compare import train_and_compare
from services.cli.console import plain_console
from services.cli.recorded_groups import back_test
from services.cli.variants import PlannedRun, Variant, plan_runs
from services.common.process import stop_on_signals
from services.report.backtest_table import OWN_RULES
from services.report.comparison import COSTS, RunResult
from services.stack.settings import default_home
from services.stack.stack import Endpoints, find_or_start_stack

FILE = "examples/sorting.yaml"
SETTINGS: dict[str, Any] = {
    "name": "prediction",
    "steps": 60,
    "rollout.prompts_per_step": 32,
    "optimizer.minibatch_prompts": 8,
    "evaluation.every": 5,
    "evaluation.samples": 4,
    "task.test_prompts": 200,
    "sync.every": 2,
    "sync.reevaluate_every": 2,
}
"""What all runs share, chosen so that 48 runs take about an hour of one core."""
ALL_MIXED = {"direction": "fixed", "c2_range": [0.125, 0.125], "c3_range": [0.875, 0.875]}
RULES: dict[str, dict[str, Any]] = {
    OWN_RULES: {},
    "window falls": {"replay": {"window": {"direction": "easy_to_hard"}}},
    "window fixed": {"replay": {"window": {"direction": "fixed"}}},
    "window of all mixed groups": {"replay": {"window": ALL_MIXED}},
    "mixed groups of any age": {"replay": {"select": "mixed", "buffer": {"max_age": None}}},
    "age of at most 1": {"replay": {"buffer": {"max_age": 1}}},
    "age of at most 10": {"replay": {"buffer": {"max_age": 10}}},
    "any age": {"replay": {"buffer": {"max_age": None}}},
    "any age, buffer of 16": {"replay": {"buffer": {"max_age": None, "capacity": 16}}},
    "no replay": {"replay": {"select": "off"}},
    "no filter": {"fresh": {"filter": "none"}},
    "gaussian filter": {"fresh": {"filter": "gaussian"}},
    "promote any gain": {"reevaluate": {"rule": "any_gain"}},
    "no re-evaluation": {"reevaluate": {"enabled": False}},
    "fresh groups alone": {"replay": {"select": "off"}, "reevaluate": {"enabled": False}},
    "batches of 16": {"batch": {"capacity": 16}},
}
"""Rule sets of many kinds, the default rules first."""
SEEDS = (1, 2, 3)
LONGER: dict[str, Any] = {"steps": 80, "optimizer.minibatch_prompts": 4}
LONGER_RULES = ("mixed groups of any age", "no replay")
"""Twice as many updates a step, and more steps, for a rule set of much and one of little signal:
whether their order stays where replays are trained on harder."""
RESAMPLES = 1_000
LEVEL = 0.95

FIGURES: dict[str, Callable[[Mapping[str, float]], float]] = {
    "signal": lambda result: result["signal_per_step"],
    "groups": lambda result: result["groups"] / result["steps"],
    "fill": lambda result: result["fill"],
    "fresh": lambda result: result["fresh"] / result["steps"],
    "re-evaluated": lambda result: result["reevaluated"] / result["steps"],
    "replayed": lambda result: result["replayed"] / result["steps"],
    "no signal": lambda result: result["no_signal"],
    "signal of a group": lambda result: result["signal"],
    "policy age": lambda result: result["policy_age"],
    "trained before": lambda result: result["trained_before"],
    "rollouts": lambda result: result["rollouts"] / result["steps"],
}
"""Figures of a back-test by name. The first one was chosen before any run, because it counts
groups by the variance of their rewards."""

Values = NDArray[np.float64]
"""A value for each rule set."""
BySeed = Mapping[int, Values]


def planned_runs() -> list[PlannedRun]:
    """Returns the runs: those of the default rules, then the others with the first seed first.

    After the first seed, its training can be compared with the back-tests of the other seeds.
    """
    runs = plan_runs(FILE, _overrides(SETTINGS), [Variant(*each) for each in RULES.items()], SEEDS)
    return sorted(runs, key=lambda planned: planned.label != OWN_RULES)


def planned_longer_runs() -> list[PlannedRun]:
    """Returns the runs of two rule sets with more updates."""
    settings = SETTINGS | LONGER | {"name": "prediction-longer"}
    variants = [Variant(label, RULES[label]) for label in LONGER_RULES]
    return plan_runs(FILE, _overrides(settings), variants, SEEDS)


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def train(
    runs: Sequence[PlannedRun], home: Path, done: Callable[[Endpoints, list[PlannedRun]], None]
) -> None:
    """Trains the runs that are not finished; calls `done` with those that are after each."""
    console = plain_console()
    with find_or_start_stack(home, 0) as endpoints:
        for number, planned in enumerate(runs, start=1):
            console.print(f"{number} of {len(runs)}")
            directory = home / "pages" / planned.config.name
            train_and_compare([planned], directory=directory, home=home, console=console, port=0)
            done(endpoints, list(runs[:number]))


def read_run(client: BufferClient, planned: PlannedRun) -> dict[str, Any]:
    """Returns the evaluations of a finished run, and the responses that they took."""
    result = RunResult.read(client, planned.label)
    return {
        "rules": planned.label,
        "seed": planned.config.seed,
        "steps": result.spent_at_evaluations(COSTS["training steps"]),
        "rollouts": result.spent_at_evaluations(COSTS["training responses"]),
        "accuracy": result.values("accuracy"),
    }


def read_back_tests(client: BufferClient) -> dict[str, dict[str, float]]:
    """Returns the back-tests of all rule sets on a run that had the default ones."""
    others = [Variant(label, rules) for label, rules in RULES.items() if label != OWN_RULES]
    test = back_test(client, others, first=1, last=None, where="benchmark")
    return {label: asdict(result) for label, result in test.results.items()}


def read_effective_shares(client: BufferClient) -> dict[str, float | None]:
    """Returns the effective share of replayed tokens over a run, as its trainer measured it at each
    step, and as a back-test of the run's own rules estimates it from the shares of all ages."""
    own = back_test(client, [], first=1, last=None, where="benchmark").results[OWN_RULES]
    tokens, weighted = 0, 0.0
    for step in client.steps():
        share = step.metrics.get("divergence/replayed/ess_fraction")
        if share:
            members = client.recorded_batch(step.step).members
            replayed = sum(member.tokens for member in members if member.source == "replayed")
            tokens, weighted = tokens + replayed, weighted + replayed / share
    return {"measured": tokens / weighted if weighted else None, "estimated": own.replay_ess}


# ---- the analysis -------------------------------------------------------------------------------


def accuracies_at(runs: Sequence[Mapping[str, Any]], cost: str) -> dict[tuple[int, str], float]:
    """Returns the mean accuracy at the last four evaluations of the run that cost least, by seed
    and rules."""
    curves = {(run["seed"], run["rules"]): Curve(run[cost], run["accuracy"]) for run in runs}
    costs = cheapest_curve(list(curves.values())).last_costs
    return {key: curve.mean_at(costs) for key, curve in curves.items()}


def ranks(values: Values) -> Values:
    """Returns the ranks of values, from 0 on; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared: Values = (ends - (counts + 1) / 2)[group]
    return shared


def spearman(first: Values, second: Values) -> float:
    """Returns the rank correlation; 0 if all values of a side are equal, which orders nothing."""
    one, other = ranks(first), ranks(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


Measure = Callable[[BySeed, BySeed, Sequence[int]], float | None]
"""Compares figures with training over some seeds, which may repeat; None if these have nothing to
compare."""


def predict_others(figures: BySeed, trained: BySeed, seeds: Sequence[int]) -> float | None:
    """Returns the mean rank correlation of the figures of a seed with the training of the others,
    on average over them."""
    found = []
    for seed in seeds:
        others = [trained[other] for other in seeds if other != seed and other in trained]
        if seed in figures and others:
            found.append(spearman(figures[seed], np.mean(others, axis=0)))
    return statistics.fmean(found) if found else None


def predict_same(figures: BySeed, trained: BySeed, seeds: Sequence[int]) -> float | None:
    """Returns the mean rank correlation of the figures of a seed with its own training."""
    both = [seed for seed in seeds if seed in figures and seed in trained]
    if not both:
        return None
    return statistics.fmean(spearman(figures[seed], trained[seed]) for seed in both)


def correlate(figures: BySeed, trained: BySeed, measure: Measure) -> dict[str, float] | None:
    """Returns a rank correlation with its bootstrap interval, over seeds and rule sets; None if
    nothing can be compared yet."""
    seeds = sorted({*figures, *trained})
    value = measure(figures, trained, seeds)
    if value is None:
        return None
    draw = np.random.default_rng(0)
    rules = len(next(iter(trained.values())))
    values: list[float] = []
    while len(values) < RESAMPLES:
        of_rules = draw.integers(rules, size=(rules,))
        one, other = (
            {seed: row[of_rules] for seed, row in table.items()} for table in (figures, trained)
        )
        resampled = measure(one, other, draw.choice(seeds, len(seeds)).tolist())
        if resampled is not None:  # It is None if a single seed is drawn, and there is no other.
            values.append(resampled)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return {"value": value, "low": float(low), "high": float(high)}


def decided_pairs(labels: Sequence[str], figures: BySeed, trained: BySeed) -> dict[str, int]:
    """Returns how many pairs of rule sets training decides (Tukey's test, 95% for all together),
    and in how many of them the better one has the larger mean figure."""
    observations = [
        Observation(label, seed, float(value))
        for seed, row in trained.items()
        for label, value in zip(labels, row, strict=True)
    ]
    resolution = resolve(observations)
    if resolution is None:
        return {"decided": 0, "ordered_as_trained": 0}
    mean = dict(zip(labels, np.mean(list(figures.values()), axis=0), strict=True))
    pairs = [
        (better, worse)
        for better in labels
        for worse in labels
        if better != worse and resolution.is_ahead(better, worse)
    ]
    agree = sum(bool(mean[better] > mean[worse]) for better, worse in pairs)
    return {"decided": len(pairs), "ordered_as_trained": agree}


def analyse(
    runs: Sequence[Mapping[str, Any]], back_tests: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> dict[str, Any]:
    """Returns the rank correlations of all figures with the seeds that are trained completely."""
    labels = list(RULES)
    labels_of = {seed: {run["rules"] for run in runs if run["seed"] == seed} for seed in SEEDS}
    seeds = [seed for seed in SEEDS if labels_of[seed] == set(labels)]
    result: dict[str, Any] = {
        "trained_seeds": seeds,
        "back_tested_seeds": [int(seed) for seed in back_tests],
        "rule_sets": len(labels),
    }
    if not seeds:
        return result
    complete = [run for run in runs if run["seed"] in seeds]
    for cost in ("steps", "rollouts"):
        by_run = accuracies_at(complete, cost)
        trained = {seed: np.array([by_run[seed, label] for label in labels]) for seed in seeds}
        compared: dict[str, Any] = {}
        for name, of in FIGURES.items():
            figures = {
                int(seed): np.array([of(tests[label]) for label in labels], float)
                for seed, tests in back_tests.items()
            }
            compared[name] = {
                "other_seeds": correlate(figures, trained, predict_others),
                "same_seed": correlate(figures, trained, predict_same),
                **decided_pairs(labels, figures, trained),
            }
        mean = np.mean(list(trained.values()), axis=0)
        result[f"at_equal_{cost}"] = {
            "accuracy": dict(zip(labels, mean.tolist(), strict=True)),
            "noise_ceiling": correlate(trained, trained, predict_others),
            "figures": compared,
        }
    return result


# ---- what pages say of it -----------------------------------------------------------------------


def sentence(result: Mapping[str, Any]) -> str:
    """Returns what the first line of a back-test says of the results."""
    analysis = result["analysis"]
    found = analysis["at_equal_steps"]
    signal = found["figures"]["signal"]["other_seeds"]
    ceiling = found["noise_ceiling"]
    seeds = len(analysis["trained_seeds"])
    itself = (
        "training with another seed cannot be compared yet"
        if ceiling is None
        else f"the accuracy of one seed itself ranks them with {ceiling['value']:.2f}"
    )
    return (
        f"Over {analysis['rule_sets']} rule sets that were also trained, with {seeds} "
        f"seed{'s' if seeds > 1 else ''} on one small task, the column signal ranked the "
        f"accuracies of other seeds with a correlation of {_interval(signal)}; {itself}."
    )


def table_rows(result: Mapping[str, Any]) -> list[str]:
    """Returns the rows of the table in docs/experiments.md."""
    steps, rollouts = (result["analysis"][f"at_equal_{cost}"] for cost in ("steps", "rollouts"))
    rows = [
        ("training itself", steps["noise_ceiling"], None, rollouts["noise_ceiling"], None),
        *(
            (
                name,
                figure["other_seeds"],
                figure["same_seed"],
                rollouts["figures"][name]["other_seeds"],
                figure,
            )
            for name, figure in steps["figures"].items()
        ),
    ]
    return [
        f"| {name} | {_interval(others)} | {_interval(same)} | {_interval(at_rollouts)} | "
        f"{_pairs(figure)} |"
        for name, others, same, at_rollouts, figure in rows
    ]


def _interval(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _pairs(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["decided"] == 0:
        return "-"
    return f"{figure['ordered_as_trained']} of {figure['decided']}"


def main() -> None:
    parser = make_parser(__doc__, "backtest_prediction")
    arguments = parser.parse_args()
    stop_on_signals("stopping; the same command continues")
    result: dict[str, Any] = {
        "machine": machine("torch"),
        "file": FILE,
        "settings": SETTINGS,
        "rules": RULES,
        "longer": {"settings": LONGER, "runs": []},
        "runs": [],
        "back_tests": {},
        "effective_shares": {},
    }

    def add_run(endpoints: Endpoints, finished: list[PlannedRun]) -> None:
        planned = finished[-1]
        client = BufferClient(endpoints.buffer_url, endpoints.token, run=planned.config.name)
        is_longer = planned.config.steps == LONGER["steps"]
        (result["longer"] if is_longer else result)["runs"].append(read_run(client, planned))
        if planned.label == OWN_RULES:
            seed = str(planned.config.seed)
            result["back_tests"][seed] = read_back_tests(client)
            result["effective_shares"][seed] = read_effective_shares(client)
        # A back-test, or a complete seed.
        if planned.label in (OWN_RULES, list(RULES)[-1]):
            result["analysis"] = analyse(result["runs"], result["back_tests"])
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    train([*planned_runs(), *planned_longer_runs()], default_home(), add_run)
    report(result, arguments.out)
    print(sentence(result), *table_rows(result), sep="\n")


if __name__ == "__main__":
    main()
