"""`bapo eval`: the accuracy of a model, without any service."""

from __future__ import annotations

from pathlib import Path

import click

from services.cli.console import plain_console
from services.cli.echo import echo
from services.cli.options import ConfigArguments, config_arguments, json_option
from services.cli.responses import stored_responses
from services.cli.service import open_local_object_store
from services.cli.suites import SUITES, suite_config
from services.cli.tables import show
from services.model.resolve import find_model
from services.stack.settings import default_home


@click.command("eval")
@click.argument(
    "model", help="A Hugging Face directory, or another model.path of docs/configuration.md."
)
@config_arguments
@click.option(
    "--suite",
    type=click.Choice(sorted(SUITES)),
    help="Evaluate these sets instead of the configuration's: `maths` is AIME24, AIME25, AMC, "
    "MATH500, Minerva and OlympiadBench; `countdown` is CD-34 and CD-4.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="DIRECTORY|SET=ADDRESS",
    help="With --suite maths: a directory with aime24.json, amc.json, math500.json, minerva.json "
    "and olympiad.json (or .jsonl, .parquet, and the names that MoPPS has, such as math.json), or "
    "the address of one set. May be repeated.",
)
@click.option(
    "--blank-images",
    is_flag=True,
    help="Show the model white images of the same sizes: the accuracy that remains does not come "
    "from the images.",
)
@click.option(
    "--responses",
    "responses_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default="runs/eval-MODEL-TIME.jsonl",
    help="Write each response with its verdict to this file, as a line of JSON.",
)
@json_option
def evaluate(
    model: str,
    config: ConfigArguments,
    suite: str | None,
    data: tuple[str, ...],
    blank_images: bool,
    responses_file: Path | None,
    as_json: bool,
) -> None:
    """Measure the accuracy of a model.

    Samples the prompts of a configuration's evaluation sets, or of a suite, and prints for each
    set the mean accuracy (mean@n), pass@k and maj@k with 95% confidence intervals, and how many
    prompts have 0, 1, ... n correct samples. What the model wrote, and what the verifier read in
    it, is written to a file.

    \b
    Examples:
      bapo eval tiny examples/countdown.yaml
      bapo eval tiny examples/countdown.yaml --suite countdown
      bapo eval exported/ examples/countdown.yaml evaluation.samples=16 --json
      bapo eval tiny-vision examples/geometry.yaml --blank-images
      bapo eval exported/ rollout.max_response_tokens=4096 --suite maths --data benchmarks/
      bapo eval exported/ --suite maths --data math500=math.json evaluation.sets.math500.prompts=6
    """
    from services.cli.evaluate import evaluate_directory  # imports torch
    from services.report.scores import COLUMNS, INTERVALS, score_rows

    console = plain_console(stderr=True)
    if suite is None:
        if data:
            raise click.UsageError("--data needs --suite.")
        loaded = config.load()
    else:
        chosen = suite_config(suite, config.file, config.overrides, data)
        loaded = chosen.config
        if chosen.left_out:
            console.print(f"note: no data of {', '.join(chosen.left_out)}")
    directory = find_model(model, default_home(), open_store=open_local_object_store)
    with stored_responses(directory, responses_file, console) as keep:
        evaluations = evaluate_directory(
            loaded,
            directory,
            blank_images=blank_images,
            note=lambda text: console.print(f"note: {text}", markup=False),
            keep=keep,
        )
    rows = score_rows(evaluations)
    show(evaluations, COLUMNS, rows, as_json=as_json, empty="nothing was evaluated")
    if not as_json:
        echo(f"pass@k and maj@k for every k: --json. {INTERVALS}")
