"""Holds what a back-test shows: its results, its first line, and the columns of its tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from bapo_core.backtest import BackTestResult
from bapo_core.sampler_backtest import SamplerResult

PREDICTION = (
    "Over 16 rule sets that were also trained, with 3 seeds on one small task, the column "
    "signal ranked the accuracies of other seeds with a correlation of 0.83 (0.44 to 0.92); the"
    " accuracy of one seed itself ranks them with 0.74."
)
"""What `benchmarks/results/backtest_prediction.json` says; a test compares both."""
CAVEAT = (
    "The recorded policy answered: these figures say what a rule would have trained on, not what "
    f"it would have learned. {PREDICTION}"
)
"""The first line of every output."""
SAMPLER_NOTE = (
    "Samplers draw by the recorded results. Of the prompts that the run did not roll out at the "
    "same step, accuracy, signal and no signal are estimates. Where the columns recorded and "
    "estimated, which are about the same prompts, are far apart, do not trust them."
)
DATA_RULES, SAMPLERS = "Data rules", "Samplers"
"""Titles of the tables."""
OWN_RULES = "own rules"
"""Label of the rules that a run was recorded with."""
MEASURED_ENOUGH = 0.95
"""Share of the replayed tokens whose age must have been measured for an effective share."""
NONE = "-"
"""Stands for a value that does not exist."""

_Result = TypeVar("_Result", BackTestResult, SamplerResult)


@dataclass(frozen=True, slots=True)
class RunBackTest:
    """The back-tests of one run."""

    run: str
    last_step: int
    results: Mapping[str, BackTestResult]
    """Results by the label of the rules, the run's own rules first. Empty if all rules change the
    sampler."""
    samplers: Mapping[str, SamplerResult]
    """Results by the label of the rules that change the sampler, the run's own sampler first. Empty
    if no rules change it."""
    first_difference: int | None
    """First step whose batch by the run's own rules is not the recorded one; None if all are."""
    first_other_draw: int | None
    """First step whose prompts by the run's own sampler are not the recorded ones; None if all are,
    and without `samplers`."""
    changed_at: Sequence[int]
    """First steps of the run's changes of its configuration, with which it may have been forked."""

    def as_json(self) -> dict[str, Any]:
        """Returns all values, for files and other programs."""
        return {
            "run": self.run,
            "last_step": self.last_step,
            "reproduces_recorded_batches": self.first_difference is None,
            "first_difference": self.first_difference,
            "first_other_draw": self.first_other_draw,
            "rules": {label: asdict(result) for label, result in self.results.items()},
            "samplers": {label: asdict(result) for label, result in self.samplers.items()},
        }

    def warnings(self) -> list[str]:
        """Returns sentences about what the run's own rules do not give again."""
        found = []
        if self.first_difference is not None:
            found.append(
                f"{self.run}: the batch of step {self.first_difference} by the run's own rules is "
                f"not the recorded one, so {self._cause()} composed it"
            )
        if self.first_other_draw is not None:
            found.append(
                f"{self.run}: the prompts of step {self.first_other_draw} by the run's own sampler "
                f"are not the recorded ones, so {self._cause()} drew them"
            )
        return found

    def _cause(self) -> str:
        if not self.changed_at:
            return "another version of the rules"
        steps = ", ".join(map(str, self.changed_at))
        return (
            "another configuration or another version of the rules (the configuration changed at "
            f"step {steps}, and the last one is applied to all steps)"
        )


@dataclass(frozen=True, slots=True)
class Column(Generic[_Result]):
    """A column of a table of back-tests."""

    value: Callable[[_Result], float | None]
    """The value of a result; None if it has none."""
    format: str
    meaning: str
    optional: bool = False
    """Whether the column is left out if it is 0 for all rules."""


COLUMNS: Mapping[str, Column[BackTestResult]] = {
    "fresh": Column(
        lambda result: result.fresh / result.steps,
        ".1f",
        meaning="fresh groups in a batch, on average",
    ),
    "re-evaluated": Column(
        lambda result: result.reevaluated / result.steps,
        ".1f",
        meaning="re-evaluated groups in a batch",
    ),
    "replayed": Column(
        lambda result: result.replayed / result.steps, ".1f", meaning="replayed groups in a batch"
    ),
    "full": Column(
        lambda result: result.fill,
        ".0%",
        meaning="share of the places of the batches that are taken",
    ),
    "no signal": Column(
        lambda result: result.no_signal,
        ".1%",
        meaning="share of the groups whose rewards are equal",
    ),
    "signal": Column(
        lambda result: result.signal_per_step, ".2f", meaning="sum of μ (1 − μ) over a batch"
    ),
    "policy age": Column(
        lambda result: result.policy_age,
        ".1f",
        meaning="steps between the policy that sampled a group and the step",
    ),
    "replay age": Column(
        lambda result: result.replay_age,
        ".1f",
        meaning="steps between the rollout of a replayed group and its replay",
    ),
    "trained before": Column(
        lambda result: result.trained_before,
        ".0%",
        meaning="share of the groups that an earlier batch had, too",
    ),
    "effective": Column(
        lambda result: result.replay_ess if result.replay_ess_measured >= MEASURED_ENOUGH else None,
        ".0%",
        optional=True,
        meaning="estimate of the effective share of the tokens of replayed groups",
    ),
    "measured": Column(
        lambda result: result.replay_ess_measured,
        ".0%",
        optional=True,
        meaning="share of these tokens whose age the run's own batches had",
    ),
    "rollouts": Column(
        lambda result: result.rollouts / result.steps,
        ".0f",
        meaning="responses that the rules ask for in a step",
    ),
    "cut off": Column(
        lambda result: result.cut_off,
        ".1%",
        optional=True,
        meaning="share of the responses that were cut off at `rollout.max_response_tokens`",
    ),
    "without loss": Column(
        lambda result: result.without_loss,
        ".1%",
        optional=True,
        meaning="share of the responses without a loss: cut-off ones, under `loss.mask_truncated`",
    ),
    "missing": Column(
        lambda result: result.missing / result.steps,
        ".1f",
        optional=True,
        meaning="re-evaluations in a step that the rules ask for and the run did not make",
    ),
    "of these promoted": Column(
        lambda result: result.missing_promoted / result.steps,
        ".1f",
        optional=True,
        meaning="estimate of the missing ones that would have been in the batch",
    ),
}
"""Columns of the table of data rules by heading; counts are per step."""
SAMPLER_COLUMNS: Mapping[str, Column[SamplerResult]] = {
    "drawn": Column(
        lambda result: result.drawn / result.steps,
        ".1f",
        meaning="prompts that the sampler draws in a step",
    ),
    "rolled out": Column(
        lambda result: result.recorded / result.steps,
        ".1f",
        meaning="drawn prompts that the run rolled out at the same step",
    ),
    "untried": Column(
        lambda result: result.untried / result.steps,
        ".1f",
        meaning="drawn prompts that had no recorded response before",
    ),
    "recorded": Column(
        lambda result: result.recorded_accuracy,
        ".3f",
        meaning="accuracy of the drawn prompts that were rolled out, as recorded",
    ),
    "estimated": Column(
        lambda result: result.estimated_accuracy_of_recorded,
        ".3f",
        meaning="accuracy of the same prompts, as estimated from what was recorded before",
    ),
    "accuracy": Column(
        lambda result: result.accuracy,
        ".3f",
        meaning="accuracy of all drawn prompts, estimated where they were not rolled out",
    ),
    "signal": Column(
        lambda result: result.signal_per_step,
        ".2f",
        meaning="sum of μ (1 − μ) over the drawn prompts, likewise",
    ),
    "no signal": Column(
        lambda result: result.no_signal,
        ".1%",
        meaning="share of the drawn prompts whose responses are all correct or all wrong, likewise",
    ),
}
"""Columns of the table of samplers by heading; counts are per step."""


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a table."""

    title: str
    note: str
    """What a reader must know of all cells; empty if there is nothing."""
    headings: Sequence[str]
    meanings: Sequence[str]
    """What each column has, by heading."""
    rows: Mapping[str, Sequence[str]]
    """Cells by the label of the rules."""
    values: Mapping[str, Mapping[str, float | None]]
    """Means over the runs by the label of the rules and the heading, of all columns."""

    def as_json(self) -> dict[str, Any]:
        """Returns the cells as they are shown, for the dashboard."""
        return {
            "title": self.title,
            "note": self.note,
            "headings": list(self.headings),
            "meanings": list(self.meanings),
            "rows": [{"rules": label, "cells": list(row)} for label, row in self.rows.items()],
        }


def tables_of(tests: Sequence[RunBackTest]) -> list[Table]:
    """Returns the table of the data rules and the table of the samplers, as far as there are any.

    tests: of several runs by the same rules; the values are means over the runs.
    """
    tables = []
    if tests[0].results:
        tables.append(_table(DATA_RULES, "", COLUMNS, [test.results for test in tests]))
    if tests[0].samplers:
        samplers = [test.samplers for test in tests]
        tables.append(_table(SAMPLERS, SAMPLER_NOTE, SAMPLER_COLUMNS, samplers))
    return tables


def _table(
    title: str,
    note: str,
    columns: Mapping[str, Column[_Result]],
    tests: Sequence[Mapping[str, _Result]],
) -> Table:
    values = {
        label: {
            heading: _mean([column.value(test[label]) for test in tests])
            for heading, column in columns.items()
        }
        for label in tests[0]
    }
    headings = [
        heading
        for heading, column in columns.items()
        if not column.optional or any(row[heading] for row in values.values())
    ]
    rows = {
        label: [_cell(row[heading], columns[heading].format) for heading in headings]
        for label, row in values.items()
    }
    meanings = [columns[heading].meaning for heading in headings]
    return Table(title, note, headings, meanings, rows, values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _cell(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
