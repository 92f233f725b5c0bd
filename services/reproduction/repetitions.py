"""Compares the states of experiments with the states of their repetitions with other seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bapo_core.claims import Verdict
from services.reproduction.declarations import BASE, SIZES, Declaration, Size
from services.reproduction.plans import plan_runs
from services.reproduction.states import State, find_state

UNDECIDED: Verdict = "not decided"


@dataclass(frozen=True, slots=True)
class ExperimentStates:
    """The states of an experiment with its declared seeds, and with others."""

    declared: Mapping[Size, State]
    """With the declared seeds, at each size."""
    repeat: State
    """With as many other seeds alone, at small size."""
    pooled: State
    """With the declared and the other seeds together, at small size."""


def find_states(items: Mapping[str, Declaration], results: Path) -> dict[str, ExperimentStates]:
    """Returns the states of experiments by name.

    Raises `BapoError` for results that are not their own.
    """
    return {
        name: ExperimentStates(
            {size: find_state(each, size, results) for size in SIZES},
            find_state(each.repeated(), "small", results),
            find_state(each.pooled(), "small", results),
        )
        for name, each in items.items()
    }


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the repetitions of experiments decide the same.

    A difference that several experiments test between the same runs counts once, with its verdicts
    in the first of them.
    """

    experiments: int
    """Number of experiments that have results of all runs, and of all runs of their repetition."""
    same_state: int
    """Number of these whose repetition has the same state."""
    decided: int
    """Number of differences in their tests that the declared seeds decide."""
    alike: int
    """Number of these that the other seeds decide in the same way."""
    reversed: int
    """Number of these that the other seeds decide in the opposite way; they leave the rest open."""
    undecided: int
    """Number of differences in their tests that the declared seeds leave open."""
    decided_by_all: int
    """Number of these that all seeds together decide."""
    pooled: int
    """Number of differences in their tests that all seeds together decide."""
    paired: int
    """Number of these that all seeds decide alike by the paired runs of the two variants alone."""


def compare_states(
    items: Mapping[str, Declaration], states: Mapping[str, ExperimentStates]
) -> Agreement:
    """Compares the state of each experiment at small size with the state of its repetition."""
    compared = {name: each for name, each in states.items() if each.pooled.is_judged}
    verdicts: dict[object, tuple[Verdict, Verdict, Verdict, Verdict]] = {}
    for name, each in compared.items():
        for difference, first, again, pooled, paired in zip(
            _identify_differences(items[name]),
            _verdicts(each.declared["small"]),
            _verdicts(each.repeat),
            _verdicts(each.pooled),
            _verdicts(each.pooled, paired=True),
            strict=True,
        ):
            verdicts.setdefault(difference, (first, again, pooled, paired))
    decided = [(first, again) for first, again, *_ in verdicts.values() if first != UNDECIDED]
    undecided = [pooled for first, _, pooled, _ in verdicts.values() if first == UNDECIDED]
    pooled_decided = [
        (pooled, paired) for *_, pooled, paired in verdicts.values() if pooled != UNDECIDED
    ]
    alike = sum(first == again for first, again in decided)
    left_open = sum(again == UNDECIDED for _, again in decided)
    return Agreement(
        experiments=len(compared),
        same_state=sum(
            each.declared["small"].name == each.repeat.name for each in compared.values()
        ),
        decided=len(decided),
        alike=alike,
        reversed=len(decided) - alike - left_open,
        undecided=len(undecided),
        decided_by_all=sum(pooled != UNDECIDED for pooled in undecided),
        pooled=len(pooled_decided),
        paired=sum(pooled == paired for pooled, paired in pooled_decided),
    )


def _identify_differences(declaration: Declaration) -> Iterator[object]:
    """Yields what identifies each difference in the tests: its question, and its runs."""
    runs: dict[str, set[str]] = {}
    for run in plan_runs(declaration, "small"):
        runs.setdefault(run.label, set()).add(run.name)
    first, *_ = runs
    for test in declaration.tests:
        question = test.model_copy(update={"larger": None, "than": (), "equal": None})
        for pair in test.pairs:
            compared = (
                (label == BASE, frozenset(runs[first if label == BASE else label]))
                for label in pair
            )
            yield question.model_dump_json(), frozenset(compared)


def _verdicts(state: State, *, paired: bool = False) -> list[Verdict]:
    """Returns the verdict of each difference, also where one seed gives no resolution.

    paired: whether the paired runs of the two variants alone decide.
    """
    return [
        verdict
        for result in state.results
        for verdict in (
            [each.verdict for each in (result.paired if paired else result.judgements)]
            or [UNDECIDED] * len(result.test.pairs)
        )
    ]


def describe_agreement(agreement: Agreement) -> str:
    """Says how far the repetitions decide the same, and what all seeds together decide."""
    if not agreement.experiments:
        return "No experiment has been repeated with other seeds."
    left_open = agreement.decided - agreement.alike - agreement.reversed
    text = (
        f"Experiments that were repeated with as many other seeds: {agreement.experiments}; with "
        f"the same state: {agreement.same_state}. Of the differences in their tests, the declared "
        f"seeds decide {agreement.decided}; the others decide {agreement.alike} of these alike and "
        f"{agreement.reversed} the other way, and leave {left_open} open."
    )
    if agreement.undecided:
        text += (
            f" The declared seeds leave {agreement.undecided} open; all seeds together decide "
            f"{agreement.decided_by_all} of these."
        )
    text += (
        f" All seeds together decide {agreement.pooled} differences; of these, the paired runs of "
        f"the two variants alone decide {agreement.paired}."
    )
    return f"{text} A difference that several experiments test between the same runs counts once."
