"""`bapo batches`: the batches that a run was trained on."""

from __future__ import annotations

from collections.abc import Iterator

import click

from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.options import json_option, limit_option, run_argument
from services.cli.service import connect
from services.cli.tables import show, take


@click.command
@run_argument
@limit_option
@json_option
@click.option("--step", type=int, help="Show the groups in the batch of this step instead.")
def batches(run: str, limit: int, as_json: bool, step: int | None) -> None:
    """Show the composition of the batches.

    \b
    Examples:
      bapo batches countdown
      bapo batches countdown --step 40
    """
    client = connect(run)
    if step is not None:
        manifest = client.recorded_batch(step)
        groups = [
            (
                group.source,
                group.prompt_uid,
                f"{group.correct}/{group.size}",
                f"{group.response_count}/{group.row_count}",
                group.step,
                group.policy_version,
                group.group_id,
            )
            for group in manifest.members
        ]
        columns = ["source", "prompt", "correct", "responses", "made at", "policy", "group"]
        show(manifest, columns, groups, as_json=as_json)
        return
    summaries = take(_all_batches(client), limit)
    rows = [
        (
            batch.step,
            batch.counts["fresh"],
            batch.counts["reevaluated"],
            batch.counts["replayed"],
            f"[{batch.c2:.3f}, {batch.c3:.3f}]",
            f"{batch.r_tot:.3f}",
        )
        for batch in summaries
    ]
    columns = ["step", "fresh", "re-evaluated", "replayed", "replay window", "r_tot"]
    show(summaries, columns, rows, as_json=as_json)


def _all_batches(client: BufferClient) -> Iterator[wire.BatchSummary]:
    cursor: str | None = None
    while True:
        page = client.batches(cursor=cursor, limit=1000)
        yield from page.items
        if (cursor := page.next) is None:
            return
