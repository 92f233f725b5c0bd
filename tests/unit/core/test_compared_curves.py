"""Runs are compared by one measure, at the costs of the run that costs least."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bapo_core.comparison import Curve, cheapest_curve, choose_measure
from bapo_core.config.rollouts import EvaluationMeasure


def test_a_run_has_the_accuracy_of_its_last_four_evaluations() -> None:
    curve = Curve([0, 1, 2, 3, 4], [1.0, 0.25, 0.5, 0.5, 0.75])
    assert curve.last_costs == [1, 2, 3, 4]
    assert curve.mean_at(curve.last_costs) == 0.5


def test_the_evaluation_of_the_initial_model_counts_only_if_there_is_no_other() -> None:
    assert Curve([0], [0.5]).last_costs == [0]
    assert Curve([0, 7], [0.5, 1.0]).last_costs == [7]


def test_an_accuracy_between_two_evaluations_is_interpolated() -> None:
    curve = Curve([0, 20, 40], [0.0, 0.5, 1.0])
    assert list(map(curve.value_at, (0, 10, 20, 30, 40, 50))) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_checkpoint_beyond_the_budget_is_not_the_best_one() -> None:
    curve = Curve([0, 20, 40], [0.0, 0.5, 1.0])
    assert list(map(curve.best_within, (0, 19, 20, 39, 40))) == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_curves_are_compared_where_the_cheapest_one_ends() -> None:
    cheap, dear = Curve([0, 10, 20], [0.0, 0.5, 0.75]), Curve([0, 20, 40], [0.0, 0.5, 1.0])
    assert cheapest_curve([dear, cheap]) is cheap
    assert dear.mean_at(cheap.last_costs) == (0.25 + 0.5) / 2


@pytest.mark.parametrize(
    ("of_tasks", "accuracies", "rewards", "measure"),
    [
        (["accuracy", "accuracy"], [0.0, 0.5], [0.5, 1.0], "accuracy"),
        (["reward", "reward"], [0.0, 0.5], [0.5, 1.0], "reward"),
        (["accuracy", "reward"], [0.0, 0.5], [0.5, 1.0], "accuracy"),
        (["accuracy", "accuracy"], [0.0, 0.0], [0.5, 1.0], "reward"),
        (["accuracy", "accuracy"], [0.0, 0.0], [0.5, 0.5], "accuracy"),
        (["accuracy"], [], [], "accuracy"),
    ],
)
def test_rewards_are_compared_where_accuracies_tell_nothing(
    of_tasks: Sequence[EvaluationMeasure],
    accuracies: Sequence[float],
    rewards: Sequence[float],
    measure: EvaluationMeasure,
) -> None:
    assert choose_measure(of_tasks, accuracies, rewards) == measure
