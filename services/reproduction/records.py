"""Keeps the results of runs, one JSON file each, named after the run's declaration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bapo_core.config import Section
from bapo_core.errors import BapoError
from bapo_core.types import ESS_DECAY, Source
from services import VERSION
from services.reproduction.plans import DeclaredRun

if TYPE_CHECKING:
    from services.buffer.api.wire import StepView
    from services.report.comparison import RunResult

RESULTS = Path("benchmarks/results/reproduction")
"""Directory of the results, in a checkout of the repository."""
METRICS = ("entropy", "gradient_norm", "response_length", ESS_DECAY, "divergence/fresh/kl")
"""Metrics of a step that are kept."""
DIGITS = 5
"""Significant digits of a recorded value of a step."""


class RecordedEvaluation(Section):
    """An evaluation on the held-out prompts."""

    accuracy: float
    reward: float
    bins: tuple[int, ...]
    """Number of prompts with k of n responses correct, for k = 0 to n."""
    costs: dict[str, float]
    """What the steps before it cost, by the name of the cost."""


class RecordedRun(Section):
    """The results of a run."""

    run: str
    """The run's name, which ends with the digest of what is declared of it."""
    setup: str
    seed: int
    changes: dict[str, Any]
    """Keys that differ from the setup."""
    version: str
    """Version of bapo that trained it."""
    evaluations: tuple[RecordedEvaluation, ...]
    """Evaluations on the primary set, by which claims are judged."""
    sets: dict[str, float]
    """Accuracy of the last evaluation on each set, by the set's name."""
    migration: tuple[tuple[int, ...], ...]
    """Held-out prompts by correct responses in the first (row) and the last evaluation (column)."""
    unlocked: float
    steps: dict[str, tuple[float, ...]]
    """Values of every step, by name."""


def record_run(run: DeclaredRun, result: RunResult) -> RecordedRun:
    """Returns what is kept of a finished run."""
    from services.report.comparison import COSTS  # imports matplotlib

    history = result.history
    spent = {name: result.spent_at_evaluations(cost) for name, cost in COSTS.items()}
    return RecordedRun(
        run=run.name,
        setup=run.setup,
        seed=run.seed,
        changes=dict(run.changes),
        version=VERSION,
        evaluations=tuple(
            RecordedEvaluation(
                accuracy=evaluation.mean_accuracy,
                reward=evaluation.mean_reward,
                bins=tuple(evaluation.bins),
                costs={name: _rounded(values[index]) for name, values in spent.items()},
            )
            for index, evaluation in enumerate(history.evaluations)
        ),
        sets={
            view.name: view.evaluations[-1].mean_accuracy
            for view in history.sets
            if view.evaluations
        },
        migration=tuple(map(tuple, history.migration.matrix)),
        unlocked=history.migration.unlocked_fraction,
        steps=_step_values(history.steps),
    )


def _step_values(steps: Sequence[StepView]) -> dict[str, tuple[float, ...]]:
    """Returns the values of each step that panels and tests may name."""
    sources = [source.value for source in Source]
    values: dict[str, list[float]] = {
        "training accuracy": [step.accuracy for step in steps],
        "groups in the batch": [
            float(sum(step.counts.get(source, 0) for source in sources)) for step in steps
        ],
        "rollouts of the step": [float(step.rollouts) for step in steps],
        **{
            source: [float(step.counts.get(source, 0)) for step in steps]
            for source in sources
            if any(step.counts.get(source, 0) for step in steps)
        },
    }
    for metric in METRICS:
        if any(metric in step.metrics for step in steps):
            # A step that trains nothing, or on no earlier policy's groups, has no value: the last
            # one stands.
            last, series = 0.0, []
            for step in steps:
                last = step.metrics.get(metric, last)
                series.append(last)
            values[metric] = series
    return {name: tuple(map(_rounded, series)) for name, series in values.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def write_record(record: RecordedRun, directory: Path) -> Path:
    """Writes the results of a run to its file, and returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = _path(record.run, directory)
    # Commands that share runs may write the same result at the same time.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(record.model_dump_json() + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def read_records(runs: Iterable[DeclaredRun], directory: Path) -> dict[str, RecordedRun]:
    """Returns the results of those runs that have any, by the run's name.

    Raises `BapoError` for a file that cannot be read, or that holds the results of another run:
    its declaration has changed, or the file was renamed.
    """
    records = {}
    for run in runs:
        path = _path(run.name, directory)
        if not path.is_file():
            continue
        record = _read(path)
        declared = {"run": run.name, "setup": run.setup, "seed": run.seed}
        declared |= {"changes": json.loads(json.dumps(run.changes))}
        for key, value in declared.items():
            found = getattr(record, key)
            if found != value:
                raise BapoError(
                    f"{path}: is the result of another declaration: {key} is {found!r} there, and "
                    f"{value!r} in the declaration of {run.name}; remove the file to train it again"
                )
        records[run.name] = record
    return records


def unknown_files(runs: Iterable[DeclaredRun], directory: Path) -> list[Path]:
    """Returns the files of results that belong to no declared run."""
    known = {_path(run.name, directory) for run in runs}
    return sorted(path for path in directory.glob("*.json") if path not in known)


def _path(run: str, directory: Path) -> Path:
    return directory / f"{run}.json"


def _read(path: Path) -> RecordedRun:
    try:
        values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return RecordedRun.model_validate(values)
    except (OSError, ValueError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise BapoError(
            f"{path}: is no result of a run: {reason}; remove the file to train the run again"
        ) from error
