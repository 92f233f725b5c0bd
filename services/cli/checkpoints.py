"""Selects, fetches and exports the checkpoints of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bapo_core.config import RunConfig
from bapo_core.config.rollouts import TaskConfig
from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.common.objectstore import ObjectStore
from services.model.directory import refuse_files
from services.model.resolve import ensure_model
from services.stack.settings import default_home


def select_checkpoints(
    run: str,
    kept: Sequence[wire.CheckpointView],
    *,
    step: int | None = None,
    best_of: TaskConfig | None = None,
) -> Sequence[wire.CheckpointView]:
    """Returns the selected checkpoints of those that a run keeps, newest first.

    step: the step of the one to select, or None for all. best_of: the task of the run, to select
    the one with the best evaluation alone.

    Raises `BapoError` when there is none.
    """
    if best_of is not None:
        ranked = [
            (best_of.rank(accuracy=checkpoint.accuracy, reward=checkpoint.reward), checkpoint)
            for checkpoint in kept
            if checkpoint.accuracy is not None and checkpoint.reward is not None
        ]
        if not ranked:
            raise BapoError(
                f"no checkpoint of run {run!r} was evaluated; set checkpoint.keep_best in the "
                "configuration to keep those with the best evaluations"
            )
        return [max(ranked, key=lambda pair: (pair[0], pair[1].step))[1]]
    selected = [checkpoint for checkpoint in kept if step in (None, checkpoint.step)]
    if not selected:
        steps = ", ".join(str(checkpoint.step) for checkpoint in kept)
        raise BapoError(
            f"run {run!r} keeps no checkpoint"
            + ("" if step is None else f" of step {step}")
            + (f"; it keeps those of steps {steps}" if kept else " yet")
        )
    return selected


def fetch_checkpoint(store: ObjectStore, checkpoint: wire.CheckpointView, directory: Path) -> None:
    """Downloads all files of a checkpoint. Raises `BapoError` when a digest is wrong."""
    store.get_directory(checkpoint.uri, checkpoint.manifest_digest, directory)


def export_checkpoint(
    config: RunConfig,
    checkpoint: wire.CheckpointView,
    target: Path,
    open_store: Callable[[], ObjectStore],
) -> None:
    """Writes the model of a checkpoint as a Hugging Face directory.

    config: that of the run. target: the directory, which must have no files. open_store: returns
    the object store of the checkpoint.

    Raises `BapoError` when a file of the checkpoint is not what was recorded.
    """
    from services.trainer.checkpoint_files import load_state, read_metadata
    from services.trainer.export import as_saved, model_files, write_files
    from services.trainer.load_policy import load_policy
    from services.trainer.lora import add_adapters, merge_adapter, plain_weights, trained_state

    refuse_files(target)
    source = ensure_model(config, default_home(), open_store=open_store)
    model: Any = load_policy(source).model
    add_adapters(model, config.lora, config.seed)
    with tempfile.TemporaryDirectory() as scratch:
        fetch_checkpoint(open_store(), checkpoint, Path(scratch))
        metadata = read_metadata(Path(scratch), checkpoint.uri)
        # Loads in place: the tensors of this state are the model's own.
        load_state({"model": trained_state(model)}, Path(scratch), metadata)
    weights = {name: merge_adapter(tensor, layer) for name, tensor, layer in plain_weights(model)}
    write_files(model_files(model, as_saved(model, weights), source), target)
