"""Judges claims about variants by what their runs decide, and by nothing else.

A claim is about differences between variants. `bapo_core.resolution` gives each difference d a
threshold h, so that d - h to d + h is a 95% interval for all pairs of variants together. A claim
holds if all of its intervals lie within what it states, and does not hold if one of them lies
outside. Means alone judge nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bapo_core.resolution import Decisions

Verdict = Literal["holds", "does not hold", "not decided"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the runs decide of one difference that a claim is about."""

    variant: str
    other: str
    verdict: Verdict
    difference: float
    """Estimated difference, variant minus other."""
    threshold: float
    """Half of the 95% interval of the difference; infinite if no seed connects the variants."""


def judge_larger(decisions: Decisions, variant: str, other: str, *, by: float = 0.0) -> Judgement:
    """Judges the claim that the variant's value is larger than the other's by more than `by`."""
    difference, threshold = _difference(decisions, variant, other)
    verdict: Verdict = "not decided"
    if difference - threshold > by:
        verdict = "holds"
    elif difference + threshold < by:
        verdict = "does not hold"
    return Judgement(variant, other, verdict, difference, threshold)


def judge_equal(decisions: Decisions, variant: str, other: str, *, within: float) -> Judgement:
    """Judges the claim that two values differ by at most `within`.

    A difference that is not decided is no equality: the whole interval must lie within the bounds.
    """
    difference, threshold = _difference(decisions, variant, other)
    verdict: Verdict = "not decided"
    if abs(difference) + threshold <= within:
        verdict = "holds"
    elif abs(difference) - threshold > within:
        verdict = "does not hold"
    return Judgement(variant, other, verdict, difference, threshold)


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the verdict on a claim whose parts must all hold."""
    found = set(verdicts)
    if "does not hold" in found:
        return "does not hold"
    return "holds" if found == {"holds"} else "not decided"


def _difference(decisions: Decisions, variant: str, other: str) -> tuple[float, float]:
    pair = decisions.variants.index(variant), decisions.variants.index(other)
    return float(decisions.differences[pair]), float(decisions.thresholds[pair])
