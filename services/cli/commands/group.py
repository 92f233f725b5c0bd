"""`bapo group`: what the model wrote in one group, and how it was rewarded."""

from __future__ import annotations

import click

from services.buffer.api import wire
from services.cli.echo import echo
from services.cli.options import json_option, run_argument
from services.cli.responses import describe_response, print_payload
from services.cli.service import connect
from services.cli.tables import print_json


@click.command
@run_argument
@click.argument(
    "group_id", metavar="GROUP", type=int, help="Number of the group, as `bapo prompt` shows it."
)
@json_option
def group(run: str, group_id: int, as_json: bool) -> None:
    """Show the responses of one group.

    Prints the problem, then each response with its reward. `bapo prompt RUN UID` shows the groups
    of a prompt, `bapo batches RUN --step STEP` the groups of a batch. With --json, the
    tokens are there too, with their texts and log-probs.

    \b
    Examples:
      bapo group countdown 318
      bapo group countdown 318 --json
    """
    answer = connect(run).group(group_id, tokens=as_json)
    if as_json:
        print_json(answer)
    else:
        _print_group(answer)


def _print_group(group: wire.GroupView) -> None:
    correct = sum(response.correct for response in group.responses)
    echo(
        f"{group.prompt_uid}: {correct} of {len(group.responses)} responses are correct "
        f"({group.kind}, step {group.step}, policy version {group.policy_version})"
    )
    print_payload(group.payload)
    for number, response in enumerate(group.responses, start=1):
        repeated = [
            f"done again {count} times ({cause})" for cause, count in response.repeated.items()
        ]
        facts = [*describe_response(response, len(response.token_ids)), *repeated]
        echo()
        echo(f"response {number}: {', '.join(facts)}", bold=True)
        echo(response.text)
