"""`bapo checkpoints`: what a run keeps, whether it is whole, and its model as a directory."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.cli.inspect import service, show, stack_here
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreClientSettings
from services.model.resolve import ensure_model
from services.stack.stack import default_home


def checkpoints(arguments: argparse.Namespace) -> None:
    """Lists, verifies or exports, by what `arguments` has."""
    client = service(arguments.run)
    kept = client.checkpoints()
    if arguments.verify or arguments.export is not None:
        found = _chosen(arguments, kept)
        if arguments.verify:
            for each in found:
                _verify(each)
        if arguments.export is not None:
            _export(client.run_state().config, found[0], arguments.export)
        return
    rows = [
        (
            each.step,
            each.created_at.isoformat(timespec="seconds"),
            "" if each.accuracy is None else f"{each.accuracy:.3f}",
            each.uri,
        )
        for each in kept
    ]
    show(arguments, kept, ["step", "created", "accuracy", "objects"], rows)


def _chosen(
    arguments: argparse.Namespace, kept: Sequence[wire.CheckpointView]
) -> Sequence[wire.CheckpointView]:
    """Newest first. Raises `BapoError` if there is none."""
    run = arguments.run
    if arguments.best:
        judged = [(each.accuracy, each.step, each) for each in kept if each.accuracy is not None]
        if not judged:
            raise BapoError(
                f"no checkpoint of run {run!r} was evaluated; set checkpoint.keep_best in the "
                "configuration to keep those with the best evaluations"
            )
        return [max(judged)[2]]
    found = [each for each in kept if arguments.step in (None, each.step)]
    if not found:
        raise BapoError(
            f"run {run!r} keeps no checkpoint"
            + ("" if arguments.step is None else f" of step {arguments.step}")
            + (f"; it has those of steps {[each.step for each in kept]}" if kept else " yet")
        )
    return found


def object_store() -> ObjectStore:
    """That of the environment, or of the stack that runs here."""
    if os.environ.get("BAPO_S3_ENDPOINT"):
        return ObjectStore(ObjectStoreClientSettings.load().s3)
    return ObjectStore(stack_here("set BAPO_S3_ENDPOINT").object_store)


def _fetch(checkpoint: wire.CheckpointView, directory: Path) -> None:
    """Every file, with its digest checked."""
    object_store().get_directory(checkpoint.uri, checkpoint.manifest_digest, directory)


def _verify(checkpoint: wire.CheckpointView) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _fetch(checkpoint, Path(scratch))
        sizes = [path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file()]
    print(f"step {checkpoint.step}: {len(sizes)} files, {sum(sizes):,} bytes, all as recorded")


def _export(config: RunConfig, checkpoint: wire.CheckpointView, target: Path) -> None:
    """The model of a checkpoint as a Hugging Face directory."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from services.trainer.export import as_saved, model_files, write_files
    from services.trainer.lora import add_adapters, merged, plain_weights, trained_state
    from services.trainer.policy import load_policy

    if target.exists() and any(target.iterdir()):
        raise BapoError(f"{target} is not empty; name a new directory")
    source = ensure_model(config, default_home(), Console())
    model: Any = load_policy(source).model
    add_adapters(model, config.lora, config.seed)
    with tempfile.TemporaryDirectory() as scratch:
        _fetch(checkpoint, Path(scratch))
        # In place: what is loaded is the model's own memory.
        load({"model": trained_state(model)}, checkpoint_id=scratch, no_dist=True)
    weights = {name: merged(tensor, layer) for name, tensor, layer in plain_weights(model)}
    write_files(model_files(model, as_saved(model, weights), source), target)
    print(json.dumps({"step": checkpoint.step, "model": str(target)}))
