"""`bapo buffer`: what the hard and the high-quality buffer hold."""

from __future__ import annotations

import click

from services.buffer.api import wire
from services.cli.options import json_option, limit_option, refuse_options, run_argument
from services.cli.service import connect
from services.cli.tables import show, take


@click.command
@run_argument
@click.argument(
    "buffer", type=click.Choice(["hard", "high_quality"]), help="The hard or high-quality buffer."
)
@limit_option
@json_option
@click.option("--step", type=int, help="Show it as of this step; as it is now unless given.")
@click.option("--events", is_flag=True, help="Show admissions and evictions instead.")
@click.option(
    "--after",
    type=int,
    default=0,
    metavar="STEP",
    help="With --events: only those after this step.",
)
def buffer(
    run: str,
    buffer: wire.BufferName,
    limit: int,
    as_json: bool,
    step: int | None,
    events: bool,
    after: int,
) -> None:
    """Show the contents of a buffer.

    \b
    Examples:
      bapo buffer countdown hard
      bapo buffer countdown high_quality --step 40
      bapo buffer countdown hard --events --after 30
    """
    if events:
        refuse_options("--step", why="--events shows all steps after --after")
    else:
        refuse_options("--after", why="it is for --events")
    client = connect(run)
    if events:
        listed = take(client.buffer_events(buffer, after=after), limit)
        changes = [
            (event.step, event.event, event.reason, event.prompt_uid, event.group_id)
            for event in listed
        ]
        columns = ["step", "event", "why", "prompt", "group"]
        empty = f"no group entered or left this buffer of run {run!r} after step {after}"
        show(listed, columns, changes, as_json=as_json, empty=empty)
        return
    items = take(client.buffer(buffer, step), limit)
    rows = [
        (
            item.prompt_uid,
            f"{item.accuracy:.3f}",
            item.inserted_step,
            item.age,
            item.staleness,
            item.group_id,
        )
        for item in items
    ]
    columns = ["prompt", "accuracy", "inserted at", "age", "staleness", "group"]
    when = "now" if step is None else f"at step {step}"
    show(items, columns, rows, as_json=as_json, empty=f"this buffer of run {run!r} is empty {when}")
