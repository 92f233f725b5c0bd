"""`bapo metrics`: the metrics of each step, as a table, for TensorBoard, MLflow or W&B."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from services.buffer.api.client import BufferClient
from services.cli.echo import echo
from services.cli.options import json_option, limit_option, refuse_options, run_argument
from services.cli.service import connect
from services.cli.tables import (
    fitting_columns,
    show,
    step_before_last,
    table_console,
    take_last,
)
from services.exporters.curves import curves
from services.exporters.mlflow import MlflowRun
from services.exporters.tensorboard import write_tensorboard
from services.exporters.wandb import write_wandb

COLUMNS = {
    "reward": "reward",
    "loss": "loss",
    "kl": "KL",
    "entropy": "entropy",
    "gradient_norm": "gradient",
    "clip_fraction": "clipped",
    "staleness_mean": "staleness",
    "trainer/tokens_per_second": "trained tok/s",
    "trainer/peak_memory_mib": "trainer MiB",
}
"""Metrics of the table, with their headings; `--json` and the exports have all metrics."""
MOST_IMPORTANT = ("step", "reward", "loss", "KL", "entropy", "staleness", "clipped", "gradient")
"""Columns that are kept longest where the terminal is too narrow for all."""


@click.command
@run_argument
@limit_option
@json_option
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Write all metrics below this directory as TensorBoard events.",
)
@click.option("--mlflow", metavar="URI", help="Write all metrics to the MLflow server at this URI.")
@click.option("--experiment", default="bapo", metavar="NAME", help="Experiment of MLflow.")
@click.option(
    "--wandb",
    metavar="PROJECT",
    help="Write all metrics to this project (or ENTITY/PROJECT) of Weights & Biases; with "
    "WANDB_MODE=offline, to the directory `wandb`.",
)
@click.option("--follow", is_flag=True, help="Keep exporting until the run has ended.")
def metrics(
    run: str,
    limit: int,
    as_json: bool,
    tensorboard: Path | None,
    mlflow: str | None,
    experiment: str,
    wandb: str | None,
    follow: bool,
) -> None:
    """Show or export the metrics of each step.

    With --limit, the last steps are shown; exports have all steps. `KL` is the divergence of the
    trained policy from its reference (kl.reference), in nats per token; `clipped` is a share of the
    tokens; `staleness` is in steps; `trainer MiB` is the peak memory of the largest trainer
    process: of its GPU, or of the process without one. docs/trainer.md describes all metrics.

    \b
    Examples:
      bapo metrics countdown --limit 10
      bapo metrics countdown --tensorboard events --follow
      bapo metrics countdown --mlflow http://127.0.0.1:5000
      bapo metrics countdown --wandb mine --follow
    """
    targets = [target for target in (tensorboard, mlflow, wandb) if target is not None]
    if len(targets) > 1:
        raise click.UsageError(
            "--tensorboard, --mlflow and --wandb exclude each other; give one of them."
        )
    if not targets:
        refuse_options("--follow", "--experiment", why="nothing is exported")
    else:
        refuse_options("--limit", "--json", why="an export has all steps and prints none")
    client = connect(run)
    if tensorboard is not None:
        write_tensorboard(client, tensorboard, follow=follow, log=echo)
    elif wandb is not None:
        write_wandb(
            client,
            wandb,
            Path("wandb"),
            dashboard=f"{client.url}/#/runs/{client.run}",
            follow=follow,
            log=echo,
        )
    elif mlflow is not None:
        mlflow_run = MlflowRun(mlflow, experiment, client)
        if follow:
            mlflow_run.follow(threading.Event())
        mlflow_run.write()
        echo(f"run {client.run} is in experiment {experiment!r} of {mlflow}")
    else:
        _show_table(client, limit, as_json)


def _show_table(client: BufferClient, limit: int, as_json: bool) -> None:
    after = step_before_last(client.run_state().current_step, limit)
    steps = take_last(client.steps(after=after), limit)
    headings = ["step", *COLUMNS.values()]
    rows = []
    for step in steps:
        values = curves(step)
        rows.append([str(step.step), *(_short(values.get(name)) for name in COLUMNS)])
    width = table_console().width
    fitting = fitting_columns(headings, rows, width, first=MOST_IMPORTANT)
    shown = [headings[index] for index in fitting]
    show(
        steps,
        shown,
        [[row[index] for index in fitting] for row in rows],
        as_json=as_json,
        empty=f"no step of run {client.run!r} is committed yet",
    )
    hidden = [heading for heading in headings if heading not in shown]
    if hidden and not as_json:
        echo(
            f"{', '.join(hidden)}: not shown in {width} columns; see --json, or widen the terminal",
            err=True,
        )


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
