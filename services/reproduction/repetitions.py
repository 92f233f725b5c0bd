"""Compares the states of experiments with the states of their repetitions with other seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bapo_core.claims import Verdict
from services.reproduction.declarations import SIZES, Declaration, Size
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
    """How far the repetitions of experiments decide the same."""

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


def compare_states(experiments: Iterable[ExperimentStates]) -> Agreement:
    """Compares the state of each experiment at small size with the state of its repetition."""
    compared = [each for each in experiments if each.pooled.is_judged]
    verdicts = [
        verdicts
        for each in compared
        for verdicts in zip(
            _verdicts(each.declared["small"]),
            _verdicts(each.repeat),
            _verdicts(each.pooled),
            strict=True,
        )
    ]
    decided = [(first, again) for first, again, _ in verdicts if first != UNDECIDED]
    undecided = [pooled for first, _, pooled in verdicts if first == UNDECIDED]
    alike = sum(first == again for first, again in decided)
    left_open = sum(again == UNDECIDED for _, again in decided)
    return Agreement(
        experiments=len(compared),
        same_state=sum(each.declared["small"].name == each.repeat.name for each in compared),
        decided=len(decided),
        alike=alike,
        reversed=len(decided) - alike - left_open,
        undecided=len(undecided),
        decided_by_all=sum(pooled != UNDECIDED for pooled in undecided),
    )


def _verdicts(state: State) -> list[Verdict]:
    """Returns the verdict of each difference, also where one seed gives no resolution."""
    return [
        verdict
        for result in state.results
        for verdict in (
            [judgement.verdict for judgement in result.judgements]
            or [UNDECIDED] * len(result.test.pairs)
        )
    ]


def describe_agreement(agreement: Agreement) -> str:
    """Says how far the repetitions decide the same, and what all seeds together decide."""
    if not agreement.experiments:
        return "No experiment has been repeated with other seeds."
    left_open = agreement.decided - agreement.alike - agreement.reversed
    return (
        f"Experiments that were repeated with as many other seeds: {agreement.experiments}; with "
        f"the same state: {agreement.same_state}. Of the differences in their tests, the declared "
        f"seeds decide {agreement.decided}; the others decide {agreement.alike} of these alike and "
        f"{agreement.reversed} the other way, and leave {left_open} open. The declared seeds leave "
        f"{agreement.undecided} open; all seeds together decide {agreement.decided_by_all} of "
        "these."
    )
