"""`bapo batches`: the batches that a run was trained on."""

from __future__ import annotations

import click

from services.cli.options import json_option, limit_option, refuse_options, run_argument
from services.cli.service import connect
from services.cli.tables import show, step_before_last, take_last


@click.command
@run_argument
@limit_option
@json_option
@click.option("--step", type=int, help="Show the groups in the batch of this step instead.")
def batches(run: str, limit: int, as_json: bool, step: int | None) -> None:
    """Show the composition of the batches.

    With --limit, the last batches are shown. Groups whose accuracy lies in the replay window can be
    replayed; r_tot is the accuracy that moves it.

    \b
    Examples:
      bapo batches countdown
      bapo batches countdown --step 40
    """
    if step is not None:
        refuse_options("--limit", why="--step shows all groups of a batch")
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
        empty = f"the batch of step {step} is empty: no group was fit to train on"
        show(manifest, columns, groups, as_json=as_json, empty=empty)
        return
    after = step_before_last(client.run_state().current_step, limit)
    summaries = take_last(list(client.batches(after=after)), limit)
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
    show(summaries, columns, rows, as_json=as_json, empty=f"run {run!r} has built no batch yet")
