"""Several algorithms from the same model on the same data with the same seeds, on one page."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bapo_core.config import PRESETS, ConfigError, RunConfig, config_from
from bapo_core.errors import BapoError
from services.cli.local_run import LocalRun, create, execute
from services.model.resolve import ensure_model
from services.report.comparison import RunResult, write_comparison
from services.stack.stack import Endpoints, any_stack

TUNED_PER_ALGORITHM = (
    "sync",
    "fresh",
    "reevaluate",
    "replay",
    "hard_buffer",
    "high_quality_buffer",
    "replay_window",
    "loss",
    "kl",
)
"""Sections that make an algorithm what it is: they come from its preset."""


def compare(
    config: RunConfig,
    *,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    home: Path,
    console: Console,
    port: int,
) -> Path:
    """Trains every algorithm with every seed, one after another; returns the page.

    The model, the data, the optimizer and the numbers of prompts and responses are the
    configuration's for all of them. Runs that were finished before are not trained again.
    """
    unknown = [name for name in algorithms if name not in PRESETS]
    if unknown:
        raise ConfigError(f"algorithm {unknown[0]!r} is not one of {', '.join(sorted(PRESETS))}")
    model = ensure_model(config, home, console)
    directory = Path("runs") / f"{config.name}-comparison"
    outcomes = []
    with any_stack(home, port) as endpoints:
        for seed in seeds:
            for algorithm in algorithms:
                own = variant(config, algorithm, seed)
                outcomes.append(_outcome(own, endpoints, home, model, console))
    page = write_comparison(outcomes, directory)
    _print_table(outcomes, console)
    return page


def variant(config: RunConfig, algorithm: str, seed: int) -> RunConfig:
    """`config` with another algorithm's preset and another seed."""
    given = config.model_dump(mode="json", exclude=set(TUNED_PER_ALGORITHM))
    given["rollout"].pop("max_generation_rounds")
    name = f"{config.name}-{algorithm.replace('_', '-')}-{config.steps}-s{seed}"
    return config_from({**given, "algorithm": algorithm, "seed": seed, "name": name})


def _outcome(
    config: RunConfig, endpoints: Endpoints, home: Path, model: Path, console: Console
) -> RunResult:
    run = LocalRun(config, endpoints, home, Path("runs") / config.name, console)
    state = {state.name: state for state in run.client.runs()}.get(config.name)
    if state is not None and state.status == "finished":
        console.print(f"{config.name}: finished before", highlight=False)
        return RunResult.read(run.client, _wall_seconds(run.directory))
    if state is None:
        create(run)
    elif RunConfig.model_validate(state.config) != config:
        raise BapoError(
            f"run {config.name!r} was started with another configuration; choose another name=..."
        )
    started = time.monotonic()
    execute(run, model)
    return RunResult.read(run.client, time.monotonic() - started)


def _wall_seconds(directory: Path) -> float:
    try:
        summary = json.loads((directory / "summary.json").read_text())
    except FileNotFoundError:
        return float("nan")
    return float(summary["seconds"].get("wall", "nan"))


def _print_table(outcomes: Sequence[RunResult], console: Console) -> None:
    for algorithm in dict.fromkeys(outcome.algorithm for outcome in outcomes):
        finals = [each.final.mean_accuracy for each in outcomes if each.algorithm == algorithm]
        console.print(
            f"{algorithm:12} held-out accuracy {statistics.mean(finals):.3f} "
            f"({min(finals):.3f} .. {max(finals):.3f}, {len(finals)} seeds)",
            highlight=False,
        )
