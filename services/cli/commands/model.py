"""`bapo model`: models that come with bapo."""

from __future__ import annotations

import click

from services.cli.echo import echo
from services.model.resolve import BUNDLED_MODELS


@click.group
def model() -> None:
    """Show models that come with bapo."""


@model.command
@click.option("--vision", is_flag=True, help="The model that reads diagrams, `tiny-vision`.")
@click.option("--sorting", is_flag=True, help="The model that sorts digits, `tiny-sorting`.")
@click.option(
    "--distinct", is_flag=True, help="The model that leaves out repeated digits, `tiny-distinct`."
)
def tiny(**chosen: bool) -> None:
    """Print the directory of the tiny base model.

    The model has 0.85 M parameters and knows the notation of Countdown. With `--vision`, it is
    another one of 2.2 M parameters, which reads the numbers in diagrams of the task `geometry`.
    With `--sorting` or `--distinct`, it is one of 0.85 M parameters that answers one of five
    prompts of the task of that name correctly. The repository has the recipes: `make tiny-models`
    trains them again.
    """
    names = [name for name, is_chosen in chosen.items() if is_chosen]
    if len(names) > 1:
        flags = ", ".join(f"--{name}" for name in names)
        raise click.UsageError(f"{flags} are different models; give one of them")
    echo(BUNDLED_MODELS["-".join(["tiny", *names])])
