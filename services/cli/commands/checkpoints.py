"""`bapo checkpoints`: lists, verifies or exports the checkpoints that a run keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.cli.echo import echo
from services.cli.options import json_option, refuse_options, run_argument
from services.cli.service import connect, open_object_store
from services.cli.tables import show
from services.model.directory import refuse_files
from services.model.resolve import ensure_model
from services.stack.settings import default_home


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
        kept = _select(run, kept, step, best)
    if verify:
        for checkpoint in kept:
            _verify(checkpoint)
    if export is not None:
        _export(client.run_state().config, kept[0], export)
        echo(f"the model of step {kept[0].step} is in {export}")
    if verify or export is not None:
        return
    rows = [
        (
            checkpoint.step,
            checkpoint.created_at.isoformat(timespec="seconds"),
            "" if checkpoint.accuracy is None else f"{checkpoint.accuracy:.3f}",
            checkpoint.uri,
        )
        for checkpoint in kept
    ]
    columns = ["step", "created", "accuracy", "objects"]
    show(kept, columns, rows, as_json=as_json, empty=f"run {run!r} keeps no checkpoint yet")


def _select(
    run: str, kept: Sequence[wire.CheckpointView], step: int | None, best: bool
) -> Sequence[wire.CheckpointView]:
    """Returns the selected checkpoints, newest first. Raises `BapoError` when there is none."""
    if best:
        evaluated = [
            (checkpoint.accuracy, checkpoint.step, checkpoint)
            for checkpoint in kept
            if checkpoint.accuracy is not None
        ]
        if not evaluated:
            raise BapoError(
                f"no checkpoint of run {run!r} was evaluated; set checkpoint.keep_best in the "
                "configuration to keep those with the best evaluations"
            )
        return [max(evaluated)[2]]
    selected = [checkpoint for checkpoint in kept if step in (None, checkpoint.step)]
    if not selected:
        steps = ", ".join(str(checkpoint.step) for checkpoint in kept)
        raise BapoError(
            f"run {run!r} keeps no checkpoint"
            + ("" if step is None else f" of step {step}")
            + (f"; it keeps those of steps {steps}" if kept else " yet")
        )
    return selected


def _fetch(checkpoint: wire.CheckpointView, directory: Path) -> None:
    """Downloads all files of a checkpoint. Raises `BapoError` when a digest is wrong."""
    open_object_store().get_directory(checkpoint.uri, checkpoint.manifest_digest, directory)


def _verify(checkpoint: wire.CheckpointView) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _fetch(checkpoint, Path(scratch))
        sizes = [path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file()]
    echo(f"step {checkpoint.step}: {len(sizes)} files, {sum(sizes):,} bytes, all as recorded")


def _export(config: RunConfig, checkpoint: wire.CheckpointView, target: Path) -> None:
    """Writes the model of a checkpoint as a Hugging Face directory."""
    from services.trainer.checkpoint_files import load_state, read_metadata
    from services.trainer.export import as_saved, model_files, write_files
    from services.trainer.load_policy import load_policy
    from services.trainer.lora import add_adapters, merge_adapter, plain_weights, trained_state

    refuse_files(target)
    source = ensure_model(config, default_home(), open_store=open_object_store)
    model: Any = load_policy(source).model
    add_adapters(model, config.lora, config.seed)
    with tempfile.TemporaryDirectory() as scratch:
        _fetch(checkpoint, Path(scratch))
        metadata = read_metadata(Path(scratch), checkpoint.uri)
        # Loads in place: the tensors of this state are the model's own.
        load_state({"model": trained_state(model)}, Path(scratch), metadata)
    weights = {name: merge_adapter(tensor, layer) for name, tensor, layer in plain_weights(model)}
    write_files(model_files(model, as_saved(model, weights), source), target)
