"""`bapo model`: models that come with bapo."""

from __future__ import annotations

import click
from rich.console import Console

from bapo_core.config import RunConfig
from services.model.resolve import ensure_model
from services.stack.settings import default_home


@click.group
def model() -> None:
    """Build models that come with bapo."""


@model.command
def tiny() -> None:
    """Build the tiny base model and print its directory.

    The model has 0.85 M parameters and is built once, in a minute or two.
    """
    click.echo(ensure_model(RunConfig(), default_home(), Console()))
