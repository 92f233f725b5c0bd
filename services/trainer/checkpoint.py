"""Checkpoints: the trainer's state after a step, through torch.distributed.checkpoint to S3.

Random draws depend on (seed, purpose, step) alone, so there is no generator state to keep.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from services.buffer.client import BufferClient
from services.common.objectstore import ObjectStore


def save_checkpoint(
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    buffer: BufferClient,
    store: ObjectStore,
    scratch: Path,
) -> None:
    """Shards, manifest last, then the row that makes the checkpoint exist."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        state = {"model": weights, "optimizer": optimizer_state, "step": step}
        save(state, checkpoint_id=directory)
        prefix = f"runs/{buffer.run}/checkpoints/step-{step}"
        digest = store.put_directory(prefix, Path(directory))
    buffer.record_checkpoint(step, digest)


def load_checkpoint(
    uri: str,
    digest: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    store: ObjectStore,
    scratch: Path,
) -> int:
    """Restores model and optimizer in place; returns the step after which they were saved."""
    directory = scratch / "restore"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        store.get_directory(uri, digest, directory)
        weights, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": optimizer_state, "step": 0}
        load(state, checkpoint_id=str(directory))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    finally:
        shutil.rmtree(directory)
    return int(state["step"])
