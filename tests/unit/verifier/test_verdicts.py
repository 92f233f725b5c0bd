"""Verdicts of the verifier count as correct by the rule of the run."""

from __future__ import annotations

import pytest

from services.verifier.api.wire import ItemVerdict


@pytest.mark.parametrize("status", ["timeout", "crashed", "verifier_lost", "too_large"])
def test_a_response_that_was_not_scored_is_never_correct(status: str) -> None:
    verdict = ItemVerdict(reward=0.0, status=status)
    assert not verdict.is_correct(None)
    assert not verdict.is_correct(-1.0)


def test_a_threshold_takes_the_place_of_the_status() -> None:
    scored, accepted = (ItemVerdict(reward=0.5, status=status) for status in ("scored", "ok"))
    assert [verdict.is_correct(None) for verdict in (scored, accepted)] == [False, True]
    assert [verdict.is_correct(0.5) for verdict in (scored, accepted)] == [True, True]
    assert [verdict.is_correct(0.6) for verdict in (scored, accepted)] == [False, False]
