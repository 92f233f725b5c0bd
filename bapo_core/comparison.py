"""Holds the rules by which runs are compared: the measure, and its value at equal costs.

`bapo_core.resolution` says which differences between these values their seeds decide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from bapo_core.config.rollouts import EvaluationMeasure

LAST_EVALUATIONS = 4
"""Evaluations whose mean is the accuracy, or the reward, of a run. The mean differs less between
repetitions of a run than one evaluation does."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations of a run: a measure over what the training before each evaluation cost."""

    costs: Sequence[float]
    """Cost of all steps before each evaluation, in ascending order; the cost of the initial model
    is 0."""
    values: Sequence[float]
    """Accuracy or mean reward of each evaluation; at least one."""

    @property
    def last_costs(self) -> Sequence[float]:
        """Costs of the last four evaluations.

        The evaluation of the initial model counts only if there is no other.
        """
        return (self.costs[1:] or self.costs)[-LAST_EVALUATIONS:]

    def value_at(self, cost: float) -> float:
        """Returns the value at a cost, interpolated linearly; the last value beyond the curve."""
        points = zip(self.costs, self.values, strict=True)
        for (x0, before), (x1, after) in pairwise(points):
            if x0 <= cost <= x1:
                share = (cost - x0) / max(1e-9, x1 - x0)
                return before + share * (after - before)
        return self.values[-1]

    def mean_at(self, costs: Sequence[float]) -> float:
        """Returns the mean of the values at each of these costs."""
        return mean(map(self.value_at, costs))

    def best_within(self, cost: float) -> float:
        """Returns the highest value of an evaluation before the steps have cost more."""
        points = zip(self.costs, self.values, strict=True)
        return max(value for spent, value in points if spent <= cost)


def cheapest_curve(curves: Sequence[Curve]) -> Curve:
    """Returns the curve that ends at the lowest cost, the first of several.

    All curves are compared at its `last_costs`, so that none is compared at a cost that another one
    has not reached.
    """
    return min(curves, key=lambda curve: curve.costs[-1])


def choose_measure(
    of_tasks: Collection[EvaluationMeasure],
    accuracies: Collection[float],
    rewards: Collection[float],
) -> EvaluationMeasure:
    """Returns the measure by which runs are compared.

    It is the reward if it is the measure of all their tasks. It is the reward, too, if all
    evaluations of all runs have the same accuracy, as with a task class that calls no response
    correct, and different rewards.

    of_tasks: `task.measure` of the runs. accuracies, rewards: means of all evaluations of all runs.
    """
    if all(measure == "reward" for measure in of_tasks):
        return "reward"
    return "reward" if len(set(accuracies)) == 1 < len(set(rewards)) else "accuracy"
