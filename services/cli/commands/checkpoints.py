"""`bapo checkpoints`: lists, verifies or exports the checkpoints that a run keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from services.buffer.api import wire
from services.cli.checkpoints import export_checkpoint, fetch_checkpoint, select_checkpoints
from services.cli.echo import echo
from services.cli.options import json_option, refuse_options, run_argument
from services.cli.service import connect, open_object_store
from services.cli.tables import show


@click.command
@run_argument
@click.option("--step", type=int, help="Select the checkpoint of this step.")
@click.option("--best", is_flag=True, help="Select the checkpoint with the best evaluation.")
@click.option("--verify", is_flag=True, help="Read the checkpoints and check every digest.")
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Write the model of the checkpoint there, as a Hugging Face directory.",
)
@json_option
def checkpoints(
    run: str, step: int | None, best: bool, verify: bool, export: Path | None, as_json: bool
) -> None:
    """List, verify or export a run's checkpoints.

    Without --step and --best, --verify reads all checkpoints, and --export takes the newest. The
    configuration says how many are kept (checkpoint.keep, checkpoint.keep_best).

    \b
    Examples:
      bapo checkpoints countdown
      bapo checkpoints countdown --verify
      bapo checkpoints countdown --best --export exported/
    """
    if best and step is not None:
        raise click.UsageError("--step and --best exclude each other; give one of them.")
    if verify or export is not None:
        refuse_options("--json", why="--verify and --export print no list")
    client = connect(run)
    kept: Sequence[wire.CheckpointView] = client.checkpoints()
    if verify or export is not None or best or step is not None:
        task = client.run_state().config.task if best else None
        kept = select_checkpoints(run, kept, step=step, best_of=task)
    if verify:
        for checkpoint in kept:
            _verify(checkpoint)
    if export is not None:
        export_checkpoint(client.run_state().config, kept[0], export, open_object_store)
        echo(f"the model of step {kept[0].step} is in {export}")
    if verify or export is not None:
        return
    rows = [
        (
            checkpoint.step,
            checkpoint.created_at.isoformat(timespec="seconds"),
            "" if checkpoint.accuracy is None else f"{checkpoint.accuracy:.3f}",
            "" if checkpoint.reward is None else f"{checkpoint.reward:.3f}",
            checkpoint.uri,
        )
        for checkpoint in kept
    ]
    columns = ["step", "created", "accuracy", "reward", "objects"]
    show(kept, columns, rows, as_json=as_json, empty=f"run {run!r} keeps no checkpoint yet")


def _verify(checkpoint: wire.CheckpointView) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fetch_checkpoint(open_object_store(), checkpoint, Path(scratch))
        sizes = [path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file()]
    echo(f"step {checkpoint.step}: {len(sizes)} files, {sum(sizes):,} bytes, all as recorded")
