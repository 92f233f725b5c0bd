"""Checkpoints: the trainer's state after a step, through torch.distributed.checkpoint to S3.

Every rank copies its shards, then writes and uploads them in the background while it trains. Rank 0
uploads the manifest last, then records the row that makes the checkpoint exist. A checkpoint can be
loaded by another number of ranks than saved it.

Random draws depend on (seed, purpose, step) alone, so there is no generator state to keep.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bapo_core.errors import BapoError, TransientError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import StoredVersion
from services.common import layout
from services.common.errors import first_line
from services.common.objectstore import ObjectStore, files_of
from services.trainer.background import Background
from services.trainer.checkpoint_files import load_state, read_metadata
from services.trainer.ranks import Ranks
from services.trainer.save_plans import as_rank_error

_TRAINED = StateDictOptions(ignore_frozen_params=True)
"""Leaves out frozen weights: with adapters, these are the initial model's."""


SUPERVISED_OPTIMIZER = "supervised_optimizer"
"""The name under which checkpoints store the optimizer of supervised updates."""

ModuleStates: TypeAlias = Mapping[str, tuple[nn.Module, Mapping[str, Optimizer]]]
"""The modules whose state a checkpoint stores, with the optimizers that train them, each by the
name under which it is stored: `model` (the policy) with `optimizer`, and `supervised_optimizer` if
the run has supervised updates; `critic` with `critic_optimizer`, with BA-PPO; and `reference`,
which has no optimizer, if the policy has replaced the initial reference."""


def state_of(modules: ModuleStates) -> dict[str, Any]:
    """Returns the state dicts that a checkpoint stores, by name. Every rank calls it."""
    state: dict[str, Any] = {}
    for name, (module, optimizers) in modules.items():
        inside = _saved_module(name, module)
        options = _TRAINED if optimizers else None
        state[name] = get_model_state_dict(inside, options=options)
        for optimizer_name, optimizer in optimizers.items():
            state[optimizer_name] = get_optimizer_state_dict(inside, optimizer, options=options)
    return state


def _saved_module(name: str, module: Any) -> nn.Module:
    """Returns the model inside a policy, so that its weights have their plain names."""
    inside: nn.Module = module if name == "critic" else module.model
    return inside


class Checkpointer(Background):
    """Saves one checkpoint at a time; the next call raises the error of one that failed."""

    def __init__(
        self, buffer: BufferClient, store: ObjectStore, *, scratch: Path, ranks: Ranks
    ) -> None:
        self._buffer, self._store, self._scratch = buffer, store, scratch
        # Training uses the default process group meanwhile.
        group = dist.new_group(backend="gloo")
        self._group, self._ranks = group, Ranks(ranks.rank, ranks.size, group)
        super().__init__("checkpoint")
        self._copy: Any = None
        """State on the CPU. The memory is reused: new memory is slow to fill."""

    def save(self, step: int, modules: ModuleStates) -> None:
        """Copies the state and returns; the checkpoint exists some time later. Every rank calls it.

        Raises the error of the checkpoint before, if that failed.
        """
        self.settle()
        self._copy = _copy_to_cpu(state_of(modules), self._copy)
        self.begin(partial(self._write, step))

    def _write(self, step: int) -> None:
        prefix = layout.checkpoint(self._buffer.run, step, self._buffer.attempt)
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            try:
                save(
                    {**self._copy, "step": step},
                    checkpoint_id=directory,
                    process_group=self._group,
                )
            except CheckpointException as error:
                # It is no `Exception`, so nothing would log it, and a restart may well help.
                raise TransientError(_describe_failure(step, error)) from error
            digests = self._store.put_contents(prefix, files_of(Path(directory)))
        by_rank = self._ranks.gather_to_main(digests)
        if self._ranks.is_main:
            files = {name: digest for digests in by_rank for name, digest in digests.items()}
            digest = self._store.put_manifest(prefix, files)
            self._buffer.record_checkpoint(step, digest)


def _describe_failure(step: int, error: CheckpointException) -> str:
    """Returns which ranks could not save a checkpoint, and why."""
    reasons = [
        f"rank {rank}: {first_line(as_rank_error(reason))}"
        for rank, (reason, _) in error.failures.items()
    ]
    return (
        f"the checkpoint after step {step} could not be saved ({'; '.join(reasons)}); correct this "
        "(a full disk needs space), and start the trainer again, which continues from the "
        "checkpoint before"
    )


def _copy_to_cpu(state: Any, copy: Any) -> Any:
    """Copies the tensors of `state` to the CPU, into those of `copy` unless that is None."""
    if isinstance(state, dict):
        copy = copy or {}
        return {name: _copy_to_cpu(value, copy.get(name)) for name, value in state.items()}
    if isinstance(state, list | tuple):
        copy = copy or [None] * len(state)
        return type(state)(_copy_to_cpu(value, old) for value, old in zip(state, copy, strict=True))
    if isinstance(state, DTensor):
        old = None if copy is None else copy.to_local()
        # A mesh of GPUs would take the copy back to the GPU.
        return DTensor.from_local(
            _copy_to_cpu(state.to_local(), old),
            cpu_mesh(state.device_mesh),
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


def cpu_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns a mesh of CPUs with the ranks of `mesh`. Every rank calls it, in the same order."""
    return mesh if mesh.device_type == "cpu" else _cpu_mesh_of(mesh.size())


@lru_cache(maxsize=1)
def _cpu_mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))


def load_checkpoint(
    stored: StoredVersion,
    modules: ModuleStates,
    *,
    store: ObjectStore,
    scratch: Path,
) -> None:
    """Restores modules and optimizers in place. Every rank calls it.

    Raises `BapoError` for a checkpoint that does not fit them or was stored before supervised
    updates had an optimizer of their own, for one whose index bapo has not written, and
    `ObjectStoreError` for a damaged one.
    """
    directory = scratch / "restore"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        store.get_directory(stored.uri, stored.manifest_digest, directory)
        metadata = read_metadata(directory, stored.uri)
        _check_supervised_optimizer(stored, metadata, modules)
        try:
            restore_state(directory, modules, metadata)
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise BapoError(
                f"the checkpoint {stored.uri} does not fit the model: {reason}; set model.path and "
                "lora to what the run was started with"
            ) from error
    finally:
        shutil.rmtree(directory)


def _check_supervised_optimizer(
    stored: StoredVersion, metadata: Metadata, modules: ModuleStates
) -> None:
    """Raises `BapoError` for a checkpoint that lacks the optimizer of supervised updates."""
    stored_keys = metadata.state_dict_metadata
    is_stored = any(key.startswith(f"{SUPERVISED_OPTIMIZER}.") for key in stored_keys)
    is_needed = any(SUPERVISED_OPTIMIZER in optimizers for _, optimizers in modules.values())
    if is_needed and not is_stored:
        raise BapoError(
            f"the checkpoint {stored.uri} has no state of the optimizer of supervised updates "
            "(demonstrations.supervise_every): the run was started with a version of bapo that "
            "made these updates with the policy's optimizer; finish it with that version, or start "
            "a new run"
        )


def restore_state(directory: Path, modules: ModuleStates, metadata: Metadata) -> None:
    """Restores modules and optimizers in place from the files of a checkpoint. Every rank calls it.

    metadata: what `read_metadata` has read in `directory`.
    Raises `CheckpointException`, `RuntimeError` or `ValueError` for files that do not fit them.
    """
    state = state_of(modules)
    load_state(state, directory, metadata)
    for name, (module, optimizers) in modules.items():
        inside = _saved_module(name, module)
        is_whole = not optimizers or all(weight.requires_grad for weight in module.parameters())
        options = StateDictOptions(strict=is_whole)
        set_model_state_dict(inside, state[name], options=options)
        for optimizer_name, optimizer in optimizers.items():
            set_optimizer_state_dict(
                inside, optimizer, optim_state_dict=state[optimizer_name], options=options
            )
