"""`bapo model`: models that come with bapo."""

from __future__ import annotations

import click

from services.cli.echo import echo
from services.model.resolve import TINY_MODEL, TINY_VISION_MODEL


@click.group
def model() -> None:
    """Show models that come with bapo."""


@model.command
@click.option("--vision", is_flag=True, help="The model that reads diagrams, `tiny-vision`.")
def tiny(vision: bool) -> None:
    """Print the directory of the tiny base model.

    The model has 0.85 M parameters and knows the notation of Countdown. With `--vision`, it is
    another one of 2.2 M parameters, which reads the numbers in diagrams of the task `geometry`.
    The repository has the recipes of both: `make tiny-models` trains them again.
    """
    echo(TINY_VISION_MODEL if vision else TINY_MODEL)
