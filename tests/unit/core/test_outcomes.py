"""A response is blamed for what it can cause, and for nothing else."""

from __future__ import annotations

import pytest

from bapo_core.outcomes import KILLS, UNBEGUN, Cause, Loss, Outcome, has_answer, judge_losses


def losses(cause: Cause, *alone: bool) -> list[Loss]:
    return [Loss(cause, each) for each in alone]


@pytest.mark.parametrize(
    ("cause", "outcome"), [(Cause.DEADLINE, Outcome.TIMED_OUT), (Cause.ENDED, Outcome.CRASHED)]
)
def test_a_response_is_blamed_the_second_time_when_it_is_alone(
    cause: Cause, outcome: Outcome
) -> None:
    assert judge_losses(losses(cause, False)) is None
    assert judge_losses(losses(cause, True)) is None
    assert judge_losses(losses(cause, False, False)) is None
    assert judge_losses(losses(cause, False, True)) == outcome
    assert judge_losses(losses(cause, True, True)) == outcome


def test_the_last_loss_names_the_outcome() -> None:
    ended, hung = losses(Cause.ENDED, True), losses(Cause.DEADLINE, True)
    assert judge_losses([*ended, *hung]) == Outcome.TIMED_OUT
    assert judge_losses([*hung, *ended]) == Outcome.CRASHED


def test_kills_from_outside_are_blamed_only_when_they_never_end() -> None:
    assert judge_losses(losses(Cause.KILLED, *[False] * 100)) is None
    assert judge_losses(losses(Cause.KILLED, *[True] * (KILLS - 1))) is None
    assert judge_losses(losses(Cause.KILLED, *[True] * KILLS)) == Outcome.CRASHED


def test_a_response_that_no_worker_begins_has_no_answer() -> None:
    assert judge_losses(losses(Cause.UNBEGUN, *[True] * (UNBEGUN - 1))) is None
    assert judge_losses(losses(Cause.UNBEGUN, *[True] * UNBEGUN)) == Outcome.VERIFIER_LOST


def test_what_the_policy_can_cause_is_an_answer_and_nothing_else_is() -> None:
    assert {outcome for outcome in Outcome if has_answer(outcome)} == {
        Outcome.SCORED,
        Outcome.TIMED_OUT,
        Outcome.CRASHED,
    }
