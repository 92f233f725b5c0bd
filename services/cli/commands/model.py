"""`bapo model`: models that come with bapo."""

from __future__ import annotations

import click

from services.cli.echo import echo
from services.model.resolve import TINY_MODEL, TINY_SORTING_MODEL, TINY_VISION_MODEL


@click.group
def model() -> None:
    """Show models that come with bapo."""


@model.command
@click.option("--vision", is_flag=True, help="The model that reads diagrams, `tiny-vision`.")
@click.option("--sorting", is_flag=True, help="The model that sorts digits, `tiny-sorting`.")
def tiny(vision: bool, sorting: bool) -> None:
    """Print the directory of the tiny base model.

    The model has 0.85 M parameters and knows the notation of Countdown. With `--vision`, it is
    another one of 2.2 M parameters, which reads the numbers in diagrams of the task `geometry`.
    With `--sorting`, it is one of 0.85 M parameters that sorts the digits of few numbers correctly,
    for the task `sorting`. The repository has the recipes: `make tiny-models` trains them again.
    """
    if vision and sorting:
        raise click.UsageError("--vision and --sorting are two models; give one of them")
    echo(TINY_VISION_MODEL if vision else TINY_SORTING_MODEL if sorting else TINY_MODEL)
