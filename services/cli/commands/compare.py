"""`bapo compare`: trains several algorithms with several seeds, and compares them on one page."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from bapo_core.config import PRESETS, ConfigError, RunConfig, config_from
from bapo_core.errors import BapoError
from services.cli.local_run import LocalRun, create_run, execute
from services.cli.options import ConfigArguments, config_arguments, port_option
from services.cli.service import open_local_object_store
from services.common.process import stop_on_signals
from services.model.resolve import ensure_model
from services.stack.settings import default_home
from services.stack.stack import Endpoints, any_stack

if TYPE_CHECKING:
    from services.report.comparison import RunResult

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
"""Sections that define an algorithm: they come from its preset."""


@click.command
@config_arguments
@click.option(
    "--algorithms",
    default="bapo,grpo,dapo",
    metavar="LIST",
    help="Algorithms, separated by commas.",
)
@click.option("--seeds", default="1,2,3", metavar="LIST", help="Seeds, separated by commas.")
@port_option
def compare(config: ConfigArguments, algorithms: str, seeds: str, port: int) -> None:
    """Train several algorithms with several seeds.

    The runs follow one another, with the same model, data, optimizer and numbers of prompts and
    responses. Runs that are finished already are not trained again. The page with the comparison
    is written to `runs/NAME-comparison`.

    \b
    Examples:
      bapo compare examples/countdown.yaml
      bapo compare examples/countdown.yaml steps=25 --algorithms bapo,grpo --seeds 1
    """
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise click.BadParameter(f"{seeds!r} are not whole numbers", param_hint="--seeds") from None
    stop_on_signals()
    page = train_and_compare(
        config.load(),
        algorithms=algorithms.split(","),
        seeds=numbers,
        home=default_home(),
        console=Console(),
        port=port,
    )
    click.echo(page)


def train_and_compare(
    config: RunConfig,
    *,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    home: Path,
    console: Console,
    port: int,
) -> Path:
    """Trains every algorithm with every seed and returns the page that compares them.

    Raises `ConfigError` when an algorithm does not exist, and `BapoError` when a run fails.
    """
    from services.report.comparison import write_comparison  # imports matplotlib

    unknown = [name for name in algorithms if name not in PRESETS]
    if unknown:
        raise ConfigError(f"algorithm {unknown[0]!r} is not one of {', '.join(sorted(PRESETS))}")
    model = ensure_model(config, home, open_store=open_local_object_store)
    directory = Path("runs") / f"{config.name}-comparison"
    outcomes = []
    with any_stack(home, port) as endpoints:
        for seed in seeds:
            for algorithm in algorithms:
                run_config = variant(config, algorithm, seed)
                outcomes.append(_train(run_config, endpoints, home, model, console))
    page = write_comparison(outcomes, directory)
    _print_table(outcomes, console)
    return page


def variant(config: RunConfig, algorithm: str, seed: int) -> RunConfig:
    """Returns `config` with the preset of another algorithm and another seed."""
    shared = config.model_dump(mode="json", exclude=set(TUNED_PER_ALGORITHM))
    shared["rollout"].pop("max_generation_rounds")
    name = f"{config.name}-{algorithm.replace('_', '-')}-{config.steps}-s{seed}"
    return config_from({**shared, "algorithm": algorithm, "seed": seed, "name": name})


def _train(
    config: RunConfig, endpoints: Endpoints, home: Path, model: Path, console: Console
) -> RunResult:
    """Trains one run, or continues it, or reads its results when it is finished."""
    from services.report.comparison import RunResult  # imports matplotlib

    run = LocalRun(config, endpoints, home, Path("runs") / config.name, console)
    state = {state.name: state for state in run.client.runs()}.get(config.name)
    if state is not None and state.status == "finished":
        console.print(f"{config.name}: finished already", highlight=False)
        return RunResult.read(run.client, _wall_seconds(run.directory))
    if state is None:
        create_run(run)
    elif state.config != config:
        raise BapoError(
            f"run {config.name!r} was started with another configuration; choose another name "
            "(name=...)"
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
        finals = [
            outcome.final.mean_accuracy for outcome in outcomes if outcome.algorithm == algorithm
        ]
        console.print(
            f"{algorithm:12} held-out accuracy {statistics.mean(finals):.3f} "
            f"({min(finals):.3f} .. {max(finals):.3f}, {len(finals)} seeds)",
            highlight=False,
        )
