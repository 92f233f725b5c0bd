"""Accuracies and costs of an experiment's variants, with the places that their runs decide."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from bapo_core.resolution import format_places, resolve
from services.reproduction.declarations import Cost, Declaration, Measure
from services.reproduction.states import LOWER_IS_BETTER, LabelledRecord, measure_runs

COSTS = {"rollouts", "tokens"}
"""Measures of what a run costs. Variants have no places by a cost."""
DECIDED_ABOVE = "decided above"
"""Label of the row that has the resolution of each score."""


def tabulate(
    declaration: Declaration, results: Sequence[LabelledRecord]
) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and the rows of a table: a row for each variant, in declared order.

    A score is the mean over the seeds ± the standard deviation, and in parentheses the places that
    the variant may have: all true places lie within a column's places with 95% probability. The
    last row, `DECIDED_ABOVE`, has the smallest difference that is decided for every pair of
    variants. There are no places, and no such row, with one seed or with one variant. A cost is the
    mean alone.

    results: of all runs of the experiment.
    """
    labels = list(dict.fromkeys(each.label for each in results))
    rows: dict[str, list[str]] = {label: [label] for label in labels}
    columns = _columns(declaration)
    smallest = [DECIDED_ABOVE]
    for measure, at in columns.values():
        observations = measure_runs(measure, at, results)
        is_cost = measure in COSTS
        resolution = None if is_cost else resolve(observations)
        higher = measure not in LOWER_IS_BETTER
        places = {} if resolution is None else resolution.places(higher_is_better=higher)
        smallest.append("" if resolution is None else f"{resolution.smallest_difference:.3f}")
        for label in labels:
            values = [each.value for each in observations if each.variant == label]
            shown = f"{mean(values):,.0f}" if is_cost else _score(values, places.get(label))
            rows[label].append(shown)
    decided = [smallest] if any(smallest[1:]) else []
    return ["variant", *columns], [*rows.values(), *decided]


def _columns(declaration: Declaration) -> dict[str, tuple[Measure, Cost]]:
    """Returns what the columns measure, and at which cost, by their heads."""
    costs: list[Cost] = ["training steps", *(test.at for test in declaration.tests)]
    columns: dict[str, tuple[Measure, Cost]] = {
        f"accuracy at equal {cost}": ("accuracy", cost)
        for cost in dict.fromkeys([*costs, "generated tokens"])
    }
    return columns | {
        "best checkpoint": ("best", "training steps"),
        "held-out prompts at 0": ("unsolved", "training steps"),
        "generated tokens": ("tokens", "training steps"),
    }


def _score(values: Sequence[float], places: tuple[int, int] | None) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    shown = "" if places is None else f" ({format_places(places)})"
    return f"{mean(values):.3f}{spread}{shown}"
