"""`bapo responses`: what the model wrote, in evaluations and in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from services.buffer.api import wire
from services.cli.echo import echo
from services.cli.options import json_option, limit_option, refuse_options
from services.cli.responses import (
    SampledResponse,
    describe_response,
    print_payload,
    read_responses,
)
from services.cli.service import connect
from services.cli.tables import print_json, take


@click.command
@click.argument("run", help="Name of the run, or a file (.jsonl) that `bapo eval` has written.")
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
    with the first step, or policy version. `bapo group` shows the tokens of a group. Of a file,
    lists the responses to every set; no service is needed.

    \b
    Examples:
      bapo responses countdown --set test --wrong --limit 10
      bapo responses countdown --first 1 --contains "sorry"
      bapo responses countdown --set test --first 1 --last 1 --json
      bapo responses runs/eval-model-20260102-030405.jsonl --wrong
    """
    if run.endswith(".jsonl"):
        refuse_options("--first", "--last", why="a file has the responses of one model")
        chosen = _choose(read_responses(Path(run)), evaluation_set, correct, contains)
        _show(chosen[:limit], as_json, empty=f"{run} has no such response")
        return
    matching = connect(run).responses(
        page_size=max(1, min(limit, 200)),
        evaluation_set=evaluation_set,
        correct=correct,
        contains=contains,
        first=first,
        last=last,
    )
    listed = take(matching, limit)
    empty = f"run {run!r} has no such response in these steps; `--first 1` lists all steps"
    _show(listed, as_json, empty)


def _choose(
    responses: Sequence[SampledResponse],
    evaluation_set: str | None,
    correct: bool | None,
    contains: str | None,
) -> list[SampledResponse]:
    """Returns the responses of a file that the options ask for."""
    return [
        response
        for response in responses
        if evaluation_set in (None, response.evaluation_set)
        and correct in (None, response.correct)
        and (contains or "").casefold() in response.text.casefold()
    ]


def _show(
    listed: Sequence[wire.ListedResponse | SampledResponse], as_json: bool, empty: str
) -> None:
    if as_json:
        print_json(listed)
    elif not listed:
        echo(empty, err=True)
    else:
        _print_responses(listed)


def _print_responses(responses: Sequence[wire.ListedResponse | SampledResponse]) -> None:
    shown = ""
    for response in responses:
        heading = f"{response.prompt_uid} ({_origin_of(response)})"
        if heading != shown:
            if shown:
                echo()
            shown = heading
            echo(heading)
            print_payload(response.payload)
        facts = describe_response(response, response.tokens)
        echo()
        echo(f"response {response.index + 1}: {', '.join(facts)}", bold=True)
        echo(response.text)


def _origin_of(response: wire.ListedResponse | SampledResponse) -> str:
    """Returns the group of a response; of a file, which has no groups, the evaluation set."""
    if isinstance(response, SampledResponse):
        return f"evaluation set {response.evaluation_set}"
    counter = "version" if response.kind == "evaluation" else "step"
    return f"{response.kind}, {counter} {response.step}, group {response.group_id}"
