"""`bapo responses`: what the model wrote, in evaluations and in training."""

from __future__ import annotations

import click

from services.buffer.api import wire
from services.cli.echo import echo
from services.cli.options import json_option, limit_option, run_argument
from services.cli.responses import describe_response, print_payload
from services.cli.service import connect
from services.cli.tables import print_json, take


@click.command
@run_argument
@limit_option
@json_option
@click.option(
    "--set",
    "evaluation_set",
    metavar="NAME",
    help="Show responses to this evaluation set; without it, those to training prompts.",
)
@click.option("--wrong", "correct", flag_value=False, default=None, help="Only wrong responses.")
@click.option("--correct", flag_value=True, default=None, help="Only correct responses.")
@click.option("--contains", metavar="TEXT", help="Only responses with this text, in any case.")
@click.option(
    "--first",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="First step to list, or policy version with --set; unless given, the last one.",
)
@click.option(
    "--last",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Last step to list, or policy version with --set; unless given, the newest one.",
)
def responses(
    run: str,
    limit: int,
    as_json: bool,
    evaluation_set: str | None,
    correct: bool | None,
    contains: str | None,
    first: int | None,
    last: int | None,
) -> None:
    """Show what the model wrote, and what the verifier read.

    Lists the responses of the newest step, or of the last evaluation on a set. `--first 1` begins
    with the first step, or policy version. `bapo group` shows the tokens of a group.

    \b
    Examples:
      bapo responses countdown --set test --wrong --limit 10
      bapo responses countdown --first 1 --contains "sorry"
      bapo responses countdown --set test --first 1 --last 1 --json
    """
    matching = connect(run).responses(
        page_size=max(1, min(limit, 200)),
        evaluation_set=evaluation_set,
        correct=correct,
        contains=contains,
        first=first,
        last=last,
    )
    listed = take(matching, limit)
    if as_json:
        print_json(listed)
    elif not listed:
        echo(
            f"run {run!r} has no such response in these steps; `--first 1` lists all steps",
            err=True,
        )
    else:
        _print_responses(listed)


def _print_responses(responses: list[wire.ListedResponse]) -> None:
    shown: int | None = None
    for response in responses:
        if response.group_id != shown:
            if shown is not None:
                echo()
            shown = response.group_id
            counter = "version" if response.kind == "evaluation" else "step"
            echo(
                f"{response.prompt_uid} ({response.kind}, {counter} {response.step}, group "
                f"{response.group_id})"
            )
            print_payload(response.payload)
        facts = describe_response(response, response.tokens)
        echo()
        echo(f"response {response.index + 1}: {', '.join(facts)}", bold=True)
        echo(response.text)
