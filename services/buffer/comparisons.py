"""Comparison of two runs: differences of their configuration and their results."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from services.buffer.api import wire
from services.buffer.committed_steps import sum_training_data
from services.buffer.difficulty import bins_at
from services.buffer.evaluations import list_evaluations
from services.buffer.tables import Run


def compare_runs(session: Session, first: Run, second: Run) -> wire.RunComparison:
    """Returns configuration, training data, difficulty and evaluations of two runs in pairs."""
    pair = (first, second)
    accuracy = [
        {
            evaluation.version: evaluation.mean_accuracy
            for evaluation in list_evaluations(session, r)
        }
        for r in pair
    ]
    rollouts, tokens = zip(*(sum_training_data(session, run) for run in pair), strict=True)
    bins = [bins_at(session, run, run.current_step) for run in pair]
    values = [_dotted(run.config) for run in pair]
    return wire.RunComparison(
        runs=(first.name, second.name),
        differing_config={
            key: (values[0].get(key), values[1].get(key))
            for key in sorted(values[0].keys() | values[1].keys())
            if values[0].get(key) != values[1].get(key)
        },
        steps=(first.current_step, second.current_step),
        rollouts=(rollouts[0], rollouts[1]),
        tokens=(tokens[0], tokens[1]),
        difficulty=(bins[0], bins[1]),
        evaluations=[
            (version, accuracy[0].get(version), accuracy[1].get(version))
            for version in sorted(accuracy[0].keys() | accuracy[1].keys())
        ],
    )


def _dotted(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested sections into one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
