"""Checkpoints: the trainer's state after a step, through torch.distributed.checkpoint to S3.

Every rank copies its shards and goes on training; in the background it writes and sends them. Rank
0 writes the manifest last, then the row that makes the checkpoint exist. Any number of ranks can
read what any other number has written.

Random draws depend on (seed, purpose, step) alone, so there is no generator state to keep.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import StoredVersion
from services.common import layout
from services.common.objectstore import ObjectStore, files_of
from services.trainer.background import Background
from services.trainer.ranks import Ranks

_TRAINED = StateDictOptions(ignore_frozen_params=True)
"""With adapters, the model's own weights are those of the initial model."""


Trained: TypeAlias = dict[str, tuple[nn.Module, Optimizer]]
"""What a checkpoint holds, by name: `model`, which every one has, and `critic`."""


def _state(trained: Trained) -> dict[str, Any]:
    """As it is stored. The policy's own model is there under its plain names."""
    found: dict[str, Any] = {}
    for name, (module, optimizer) in trained.items():
        held = _held(name, module)
        found[name], found[_optimizer(name)] = get_state_dict(held, optimizer, options=_TRAINED)
    return found


def _held(name: str, module: Any) -> nn.Module:
    held: nn.Module = module.model if name == "model" else module
    return held


def _optimizer(name: str) -> str:
    return "optimizer" if name == "model" else f"{name}_optimizer"


class Checkpointer(Background):
    """Saves one checkpoint at a time; a failure is raised by the next call."""

    def __init__(
        self, buffer: BufferClient, store: ObjectStore, *, scratch: Path, ranks: Ranks
    ) -> None:
        self._buffer, self._store, self._scratch = buffer, store, scratch
        # Of its own, because the default group is used meanwhile.
        group = dist.new_group(backend="gloo")
        self._group, self._ranks = group, Ranks(ranks.rank, ranks.size, group)
        super().__init__("checkpoint")
        self._copy: Any = None
        """Kept from one to the next: memory that is new each time is slow to fill."""

    def save(self, step: int, trained: Trained) -> None:
        """Returns when the state is copied; the checkpoint exists some time after."""
        self.settle()
        self._copy = _copied(_state(trained), self._copy)
        self.begin(partial(self._write, step))

    def _write(self, step: int) -> None:
        prefix = layout.checkpoint(self._buffer.run, step)
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            save({**self._copy, "step": step}, checkpoint_id=directory, process_group=self._group)
            own = self._store.put_contents(prefix, files_of(Path(directory)))
        listings = self._ranks.gathered(own)
        if self._ranks.speaks:
            listing = {name: digest for each in listings for name, digest in each.items()}
            digest = self._store.put_manifest(prefix, listing)
            self._buffer.record_checkpoint(step, digest)


def _copied(state: Any, copy: Any) -> Any:
    """`state` with its tensors on the CPU, where training does not change them; into `copy`."""
    if isinstance(state, dict):
        copy = copy or {}
        return {name: _copied(value, copy.get(name)) for name, value in state.items()}
    if isinstance(state, list | tuple):
        copy = copy or [None] * len(state)
        return type(state)(_copied(value, old) for value, old in zip(state, copy, strict=True))
    if isinstance(state, DTensor):
        old = None if copy is None else copy.to_local()
        return DTensor.from_local(
            _copied(state.to_local(), old),
            state.device_mesh,
            state.placements,
            run_check=False,
            shape=state.shape,
            stride=state.stride(),
        )
    if isinstance(state, torch.Tensor):
        if copy is None:
            copy = torch.empty_like(state, device="cpu")
        return copy.copy_(state.detach())
    return state


def load_checkpoint(
    stored: StoredVersion,
    trained: Trained,
    *,
    store: ObjectStore,
    scratch: Path,
) -> None:
    """Restores what is trained, in place. Every rank calls it."""
    directory = scratch / "restore"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        store.get_directory(stored.uri, stored.manifest_digest, directory)
        state = _state(trained)
        try:
            load(state, checkpoint_id=str(directory))
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise BapoError(
                f"the checkpoint {stored.uri} does not fit the model: {reason}; is model.path the "
                "one that the run was started with?"
            ) from error
        for name, (module, optimizer) in trained.items():
            set_state_dict(
                _held(name, module),
                optimizer,
                model_state_dict=state[name],
                optim_state_dict=state[_optimizer(name)],
                options=StateDictOptions(
                    strict=all(each.requires_grad for each in module.parameters())
                ),
            )
    finally:
        shutil.rmtree(directory)
