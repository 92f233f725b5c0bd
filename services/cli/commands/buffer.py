"""`bapo buffer`: what the hard and the high-quality buffer hold."""

from __future__ import annotations

import click

from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.options import json_option, limit_option, refuse_options, run_argument
from services.cli.service import connect
from services.cli.tables import show, take


@click.command
@run_argument
@click.argument(
    "buffer",
    type=click.Choice(["hard", "high_quality"]),
    required=False,
    help="The hard or high-quality buffer; the sizes of both unless given.",
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
    buffer: wire.BufferName | None,
    limit: int,
    as_json: bool,
    step: int | None,
    events: bool,
    after: int,
) -> None:
    """Show the contents of a buffer, or the sizes of both.

    \b
    Examples:
      bapo buffer countdown
      bapo buffer countdown hard
      bapo buffer countdown high_quality --step 40
      bapo buffer countdown hard --events --after 30
    """
    if events:
        refuse_options("--step", why="--events shows all steps after --after")
    else:
        refuse_options("--after", why="it is for --events")
    client = connect(run)
    if buffer is None:
        refuse_options("--events", "--limit", "--after", why="it needs the name of a buffer")
        _show_sizes(client, step, as_json=as_json)
        return
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


def _show_sizes(client: BufferClient, step: int | None, *, as_json: bool) -> None:
    sizes = client.buffers(step)
    rows = [
        (
            size.buffer,
            size.step,
            f"{size.entries} of {size.capacity}",
            _round(size.mean_accuracy, 3),
            f"{_round(size.mean_age, 1)} (max {_round(size.max_age, 0)})",
            f"{_round(size.mean_staleness, 1)} (max {_round(size.max_staleness, 0)})",
        )
        for size in sizes
    ]
    columns = ["buffer", "step", "groups", "accuracy", "age", "staleness"]
    show(sizes, columns, rows, as_json=as_json, empty="")


def _round(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
