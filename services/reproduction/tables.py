"""The measures of an experiment's variants, with the places that their runs decide."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from bapo_core.resolution import resolve
from services.reproduction.declarations import Declaration, Test
from services.reproduction.states import LOWER_IS_BETTER, LabelledRecord, observe

PLACES = {"accuracy", "unsolved"}
"""Measures by which variants have places; the others are what a run costs."""


def tabulate(
    declaration: Declaration, results: Sequence[LabelledRecord]
) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and the rows of a table: a row for each variant, in declared order.

    A score is the mean over the seeds ± the standard deviation, and in brackets the places that the
    variant may have: all true places lie within those of a column with 95% probability. There are
    none with one seed, or with one variant. A cost is the mean alone.

    results: of all runs of the experiment.
    """
    labels = list(dict.fromkeys(each.label for each in results))
    columns = _columns(declaration, labels)
    rows: dict[str, list[str]] = {label: [label] for label in labels}
    for test in columns.values():
        observations = observe(test, results)
        resolution = resolve(observations) if test.measure in PLACES else None
        higher = test.measure not in LOWER_IS_BETTER
        places = {} if resolution is None else resolution.places(higher_is_better=higher)
        for label in labels:
            values = [each.value for each in observations if each.variant == label]
            is_cost = test.measure not in PLACES
            shown = f"{mean(values):,.0f}" if is_cost else _score(values, places.get(label))
            rows[label].append(shown)
    return ["variant", *columns], list(rows.values())


def _columns(declaration: Declaration, labels: Sequence[str]) -> dict[str, Test]:
    """Returns what the columns measure, by their heads."""
    at = ["training steps", *(test.at for test in declaration.tests), "generated tokens"]
    pair = {"larger": labels[0], "than": labels[:1]}
    columns = {
        f"accuracy at equal {cost}": Test.model_validate(pair | {"at": cost})
        for cost in dict.fromkeys(at)
    }
    others = {"held-out prompts at 0": "unsolved", "generated tokens": "tokens"}
    return columns | {
        head: Test.model_validate(pair | {"measure": measure}) for head, measure in others.items()
    }


def _score(values: Sequence[float], places: tuple[int, int] | None) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    shown = "" if places is None else f" ({'-'.join(map(str, dict.fromkeys(places)))})"
    return f"{mean(values):.3f}{spread}{shown}"
