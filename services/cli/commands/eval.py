"""`bapo eval`: the accuracy of a model directory, without any service."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from services.cli.options import ConfigArguments, config_arguments, json_option
from services.model.resolve import TINY_MODEL


@click.command("eval")
@click.argument("model", help="A Hugging Face directory, or `tiny`.")
@config_arguments
@json_option
def evaluate(model: str, config: ConfigArguments, as_json: bool) -> None:
    """Measure the accuracy of a model directory.

    Samples the held-out prompts of a configuration and prints the mean accuracy, pass@k and how
    many prompts have how many correct samples.

    \b
    Examples:
      bapo eval tiny examples/countdown.yaml
      bapo eval exported/ examples/countdown.yaml evaluation.samples=16 --json
    """
    from services.cli.evaluate import evaluate_directory, show  # imports torch

    loaded = config.load()
    console = Console()
    directory = TINY_MODEL if model == "tiny" else Path(model)
    result = evaluate_directory(loaded, directory)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(console, result)
