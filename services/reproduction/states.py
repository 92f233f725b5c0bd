"""Decides the state of an experiment from the results of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bapo_core.claims import Judgement, combine_verdicts, judge_equal, judge_larger
from bapo_core.comparison import Curve, cheapest_curve
from bapo_core.errors import BapoError
from bapo_core.resolution import Decisions, Observation, Resolution, decide_pairwise, resolve
from services.reproduction.declarations import BASE, Cost, Declaration, Measure, Size, Test
from services.reproduction.plans import DeclaredRun, plan_runs
from services.reproduction.records import RecordedRun, read_records

NOT_RUN = "not run"
NO_EXPERIMENT = "nothing to run"
LOWER_IS_BETTER = {"unsolved", "rollouts", "tokens"}
RESOLVED = (0.02, 0.05)
"""True differences for which a state names the number of seeds."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """What the runs decide of one test of a declaration."""

    __test__ = False
    """pytest collects classes of this name otherwise."""

    test: Test
    means: Mapping[str, float]
    """Mean over the seeds of each variant's values of the measure."""
    judgements: Sequence[Judgement]
    """None if the runs do not show how far repetitions differ."""
    resolution: Resolution | None
    paired: Sequence[Judgement]
    """Judgements of the same differences by the paired runs of the two variants alone. They check
    the assumption of the resolution that all variants have one standard deviation."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of an experiment at one size."""

    name: str
    """`nothing to run`, `not run`, `not decided`, `holds` or `does not hold`."""
    runs: int
    """Number of runs that the declaration plans."""
    done: int
    """Number of runs with results."""
    results: Sequence[TestResult] = ()
    """Empty until all runs have results: to look while runs come in, and to stop when it suits,
    would decide more than 5% of the differences that do not exist."""

    @property
    def is_judged(self) -> bool:
        """Whether all runs have results; without any run there is nothing to judge."""
        return self.name not in (NOT_RUN, NO_EXPERIMENT)


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """Results of a run as one variant of an experiment."""

    label: str
    record: RecordedRun


def read_labelled(declaration: Declaration, size: Size, directory: Path) -> list[LabelledRecord]:
    """Returns the results of an experiment's runs, in the order of the plan."""
    planned = plan_runs(declaration, size)
    records = read_records(planned, directory)
    return [LabelledRecord(run.label, records[run.name]) for run in planned if run.name in records]


def find_state(declaration: Declaration, size: Size, directory: Path) -> State:
    """Returns the state of an experiment. Raises `BapoError` for results that are not its own."""
    planned: list[DeclaredRun] = plan_runs(declaration, size)
    if not planned:
        return State(NO_EXPERIMENT, 0, 0)
    results = read_labelled(declaration, size, directory)
    if len(results) < len(planned):
        return State(NOT_RUN, len(planned), len(results))
    return judge(declaration, results)


def judge(declaration: Declaration, results: Sequence[LabelledRecord]) -> State:
    """Judges the claim of a declaration by the results of all of its runs."""
    tested = [judge_test(test, results) for test in declaration.tests]
    verdict = combine_verdicts(
        judgement.verdict if judgement is not None else "not decided"
        for each in tested
        for judgement in (each.judgements or (None,))
    )
    return State(verdict, len(results), len(results), tested)


def judge_test(test: Test, results: Sequence[LabelledRecord]) -> TestResult:
    """Returns what the results of all runs of an experiment decide of a test."""
    observations = observe(test, results)
    labels = list(dict.fromkeys(each.variant for each in observations))
    means = {
        label: mean(each.value for each in observations if each.variant == label)
        for label in labels
    }
    resolution = resolve(observations)
    judgements = _judge_pairs(test, resolution)
    paired = _judge_pairs(test, None if resolution is None else decide_pairwise(observations))
    return TestResult(test, means, judgements, resolution, paired)


def _judge_pairs(test: Test, decisions: Decisions | None) -> list[Judgement]:
    if decisions is None:
        return []
    return [
        judge_larger(decisions, variant, other, by=test.by)
        if test.within is None
        else judge_equal(decisions, variant, other, within=test.within)
        for variant, other in test.pairs
    ]


def observe(test: Test, results: Sequence[LabelledRecord]) -> list[Observation]:
    """Returns the value of a test's measure for each run, and for the base model if it is named."""
    observations = measure_runs(test.measure, test.at, results, metric=test.metric)
    if BASE in test.variants:
        if test.measure not in ("unsolved", "accuracy"):
            raise BapoError(
                f"{test.measure} of the {BASE} is not defined; use unsolved or accuracy"
            )
        first = results[0].label
        observations += [
            Observation(BASE, each.record.seed, _initial(test.measure, each.record))
            for each in results
            if each.label == first
        ]
    return observations


def measure_runs(
    measure: Measure, at: Cost, results: Sequence[LabelledRecord], *, metric: str | None = None
) -> list[Observation]:
    """Returns the value of a measure for each run.

    at: cost at which accuracies are compared: what the cheapest of the runs has spent.
    metric: name of the value of each step, for the measure `metric`.
    """
    value = _measure(measure, at, metric, [each.record for each in results])
    return [Observation(each.label, each.record.seed, value(each.record)) for each in results]


def _measure(
    measure: Measure, at: Cost, metric: str | None, records: Sequence[RecordedRun]
) -> Callable[[RecordedRun], float]:
    """Returns the function that measures a run, at costs that all runs have reached."""
    if measure in ("accuracy", "best"):
        last = cheapest_curve([curve_of(record, at) for record in records]).last_costs
        if measure == "accuracy":
            return lambda record: curve_of(record, at).mean_at(last)
        return lambda record: curve_of(record, at).best_within(last[-1])
    if metric is not None:
        return lambda record: _last_quarter(record, metric)
    return {
        "unsolved": lambda record: _unsolved(record, -1),
        "unlocked": lambda record: record.unlocked,
        "rollouts": lambda record: record.evaluations[-1].costs["training responses"],
        "tokens": lambda record: record.evaluations[-1].costs["generated tokens"],
    }[measure]


def curve_of(record: RecordedRun, cost: str) -> Curve:
    """Returns the held-out accuracy of a run over a cost."""
    return Curve(
        [each.costs[cost] for each in record.evaluations],
        [each.accuracy for each in record.evaluations],
    )


def _initial(measure: str, record: RecordedRun) -> float:
    return _unsolved(record, 0) if measure == "unsolved" else record.evaluations[0].accuracy


def _unsolved(record: RecordedRun, index: int) -> float:
    bins = record.evaluations[index].bins
    return bins[0] / sum(bins)


def _last_quarter(record: RecordedRun, metric: str) -> float:
    if metric not in record.steps:
        raise BapoError(
            f"{record.run}: has no {metric!r} of its steps; there are {', '.join(record.steps)}"
        )
    values = record.steps[metric]
    return mean(values[-max(1, len(values) // 4) :])


# -- texts


def describe_test(test: Test) -> str:
    """Says what a test states, such as "accuracy at equal training steps: bapo > grpo, dapo"."""
    measure = {
        "accuracy": f"accuracy at equal {test.at}",
        "best": f"best checkpoint at equal {test.at}",
        "unsolved": "held-out prompts at 0",
        "unlocked": "unlocked",
        "rollouts": "rollouts",
        "tokens": "generated tokens",
        "metric": f"{test.metric} of the last quarter of the steps",
    }[test.measure]
    if test.within is not None:
        return f"{measure}: {' = '.join(test.pairs[0])}, within {test.within:g}"
    larger = f" by more than {test.by:g}" if test.by else ""
    return f"{measure}: {test.larger} above {'; '.join(test.than)}{larger}"


def describe_state(state: State) -> str:
    """Says the state in a few words, with the runs that it rests on."""
    if state.name == NOT_RUN:
        return f"{NOT_RUN} ({state.done} of {state.runs} runs)"
    return f"{state.name} ({state.runs} runs)" if state.runs else state.name


def describe_result(result: TestResult) -> list[str]:
    """Says, a line each, what the runs decide of a test, and their resolution."""
    lines = [
        f"{describe_test(result.test)}: "
        + "; ".join(f"{label} {_number(value)}" for label, value in result.means.items())
    ]
    lines += map(describe_judgement, result.judgements)
    resolution = result.resolution
    if resolution is None:
        lines.append("one seed, or one variant: nothing shows how far repetitions of a run differ")
        return lines
    freedom = resolution.degrees_of_freedom
    seeds = ""
    if result.test.measure in ("accuracy", "best", "unsolved", "unlocked"):
        needed = (f"{size:g} takes {resolution.seeds_for(size)}" for size in RESOLVED)
        seeds = f"; seeds that decide a true difference in 4 of 5 cases: {', '.join(needed)}"
    lines.append(
        f"repetitions differ by {_number(resolution.deviation)} (standard deviation, {freedom} "
        f"degrees of freedom); differences above {_number(resolution.smallest_difference)} are "
        f"decided (95% for all pairs together){seeds}"
    )
    return lines


def describe_judgement(judgement: Judgement) -> str:
    """Says a difference with its 95% interval, and what it decides."""
    return (
        f"{judgement.variant} - {judgement.other} = {_number(judgement.difference, signed=True)} "
        f"± {_number(judgement.threshold)}: {judgement.verdict}"
    )


def describe_check(result: TestResult) -> list[str]:
    """Says each difference, and what the paired runs of its two variants alone decide of it."""
    return [
        f"{describe_judgement(judgement)}; by paired runs ± {_number(paired.threshold)}: "
        f"{paired.verdict}"
        for judgement, paired in zip(result.judgements, result.paired, strict=True)
    ]


def _number(value: float, *, signed: bool = False) -> str:
    if not math.isfinite(value):
        return "∞"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3
    return format(value, f"{'+' if signed else ''},.{digits}f")
