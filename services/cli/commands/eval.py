"""`bapo eval`: the accuracy of a model directory, without any service."""

from __future__ import annotations

from pathlib import Path

import click

from services.cli.options import ConfigArguments, config_arguments, json_option
from services.cli.tables import show
from services.model.resolve import TINY_MODEL


@click.command("eval")
@click.argument("model", help="A Hugging Face directory, or `tiny`.")
@config_arguments
@json_option
def evaluate(model: str, config: ConfigArguments, as_json: bool) -> None:
    """Measure the accuracy of a model directory.

    Samples the prompts of a configuration's evaluation sets, and prints for each set the mean
    accuracy (mean@n), pass@k and maj@k with 95% confidence intervals, and how many
    prompts have 0, 1, ... n correct samples.

    \b
    Examples:
      bapo eval tiny examples/countdown.yaml
      bapo eval exported/ examples/countdown.yaml evaluation.samples=16 --json
    """
    from services.cli.evaluate import evaluate_directory  # imports torch
    from services.report.scores import COLUMNS, INTERVALS, score_rows

    directory = TINY_MODEL if model == "tiny" else Path(model)
    evaluations = evaluate_directory(config.load(), directory)
    show(evaluations, COLUMNS, score_rows(evaluations), as_json=as_json)
    if not as_json:
        click.echo(f"pass@k and maj@k for every k: --json. {INTERVALS}")
