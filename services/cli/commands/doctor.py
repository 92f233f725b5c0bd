"""`bapo doctor`: finds out why a run does not learn."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.table import Table

from bapo_core.errors import BapoError
from services.cli.console import plain_console
from services.cli.echo import echo
from services.cli.options import ConfigArguments, config_arguments, json_option
from services.cli.service import open_local_object_store
from services.model.resolve import ensure_model
from services.stack.settings import default_home


@click.group
def doctor() -> None:
    """Find out why a run does not learn."""


@doctor.command
@config_arguments
@click.option(
    "--prompts", type=click.IntRange(min=1), default=32, help="Training prompts to generate for."
)
@json_option
def rollout(config: ConfigArguments, prompts: int, as_json: bool) -> None:
    """Compare the engine's log-probs with the trainer's.

    Generates with the rollout engine, scores the same tokens with the trainer, and exits with 1
    when they differ by more than the tolerance. docs/rollout.md explains the causes.

    \b
    Example:
      bapo doctor rollout examples/countdown-vllm.yaml
    """
    from services.cli.doctor import measure_parity, show  # imports torch

    loaded = config.load()
    console = plain_console()
    model = ensure_model(loaded, default_home(), open_store=open_local_object_store)
    parity = measure_parity(loaded, model, prompts=prompts)
    failures = parity.failures()
    if as_json:
        echo(json.dumps(asdict(parity) | {"failures": failures}, indent=2))
    else:
        show(console, loaded, parity)
    if failures:
        raise BapoError(
            f"out of tolerance: {', '.join(failures)}; the log-probs of engine and trainer "
            "differ, see docs/rollout.md for the causes"
        )


@doctor.command
@config_arguments
@json_option
def trainer(config: ConfigArguments, as_json: bool) -> None:
    """Show kernels, compilation and memory of the trainer.

    Loads the model as the trainer does, and shows the kernel of each kind of attention with the
    reasons against the others, whether layers are compiled, and the predicted peak of the memory on
    this machine and on GPUs of common sizes.

    \b
    Example:
      bapo doctor trainer examples/countdown.yaml lora.rank=16
    """
    from services.cli.trainer_report import report_trainer  # imports torch

    loaded = config.load()
    model = ensure_model(loaded, default_home(), open_store=open_local_object_store)
    report = report_trainer(loaded, model)
    if as_json:
        echo(json.dumps(asdict(report), indent=2))
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("device", report.device)
    for choice in report.attention:
        table.add_row("attention", choice)
    table.add_row("compiled", "yes" if report.compiled else "no")
    table.add_row("memory here", report.plan)
    for mode, predicted in report.predicted_gib.items():
        table.add_row("predicted", f"{predicted:.1f} GiB on one GPU, gradient_checkpointing {mode}")
    for card, fit in report.cards.items():
        table.add_row(f"GPU of {card}", fit)
    plain_console().print(table)
