"""Compares the states of experiments with the states of their repetitions with other seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.reproduction.states import State

UNDECIDED = "not decided"


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


def compare_states(pairs: Iterable[tuple[State, State]]) -> Agreement:
    """Compares the state of each experiment (first) with the state of its repetition (second)."""
    compared = [(state, repeat) for state, repeat in pairs if state.is_judged and repeat.is_judged]
    verdicts = [
        (judgement.verdict, other.verdict)
        for state, repeat in compared
        for result, again in zip(state.results, repeat.results, strict=True)
        for judgement, other in zip(result.judgements, again.judgements, strict=True)
        if judgement.verdict != UNDECIDED
    ]
    alike = sum(first == second for first, second in verdicts)
    left_open = sum(second == UNDECIDED for _, second in verdicts)
    return Agreement(
        experiments=len(compared),
        same_state=sum(state.name == repeat.name for state, repeat in compared),
        decided=len(verdicts),
        alike=alike,
        reversed=len(verdicts) - alike - left_open,
    )


def describe_agreement(agreement: Agreement) -> str:
    """Says how far the repetitions decide the same, in one or two sentences."""
    if not agreement.experiments:
        return "No experiment has been repeated with other seeds."
    left_open = agreement.decided - agreement.alike - agreement.reversed
    return (
        f"{agreement.experiments} experiments were repeated with as many other seeds, and "
        f"{agreement.same_state} of them have the same state. Of the {agreement.decided} "
        f"differences in their tests that the declared seeds decide, the others decide "
        f"{agreement.alike} alike and {agreement.reversed} the other way, and leave {left_open} "
        "open."
    )
