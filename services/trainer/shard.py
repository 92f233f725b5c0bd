"""Sharding a policy over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from services.common.errors import BapoError
from services.trainer.critic import Critic
from services.trainer.policy import Policy, blank_policy, load_policy
from services.trainer.ranks import Ranks

Sharded = TypeVar("Sharded", Policy, Critic)


def shard(policy: Sharded, ranks: Ranks) -> Sharded:
    """Places `policy` on this rank's device, sharded layer by layer.

    On GPUs it computes in bfloat16 from fp32 weights, and adds gradients up in fp32; on CPUs all is
    fp32. Gradients are summed over the ranks, not averaged: the loss is a share of the whole
    already. One process on a CPU has nothing to shard.
    """
    cuda = torch.cuda.is_available()
    if ranks.size == 1 and not cuda:
        return policy
    mesh = init_device_mesh("cuda" if cuda else "cpu", (ranks.size,))
    precision = MixedPrecisionPolicy()
    if cuda:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules: list[nn.Module] = [*_layers(policy.model), policy]
    for each in modules:
        # Moves what it shards to the device: a layer at a time is there as a whole.
        fully_shard(each, mesh=mesh, mp_policy=precision)
        assert isinstance(each, FSDPModule)
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return policy


def load_sharded(
    directory: Path,
    ranks: Ranks,
    *,
    prepare: Callable[[Policy], Sharded],
    gradient_checkpointing: bool = False,
) -> Sharded:
    """The model of a directory, sharded over the ranks. Every rank calls it.

    prepare: what is made of the model before that, in the same way on every rank.

    Rank 0 reads it and hands it out, a tensor at a time: the whole model is in memory once, however
    many ranks there are, and every rank has its shards besides.
    """
    whole = prepare(load_policy(directory)) if ranks.speaks else None
    if whole is not None and ranks.size == 1:
        sharded = whole
    else:
        sharded = prepare(blank_policy(directory))
    if gradient_checkpointing:
        checkpoint_layers(sharded)
    shard(sharded, ranks)
    if ranks.size > 1:
        _hand_out(whole, sharded, ranks)
    return sharded


def _hand_out(whole: Sharded | None, policy: Sharded, ranks: Ranks) -> None:
    """Gives the ranks' empty shards the weights of `whole`, which rank 0 has."""
    found: Any = whole
    set_model_state_dict(
        policy.model,
        found.model.state_dict() if ranks.speaks else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    # Not in a state dict: what a model computes once, such as the frequencies of its positions.
    buffers = dict(found.model.named_buffers()) if ranks.speaks else {}
    for name, buffer in policy.model.named_buffers():
        if ranks.speaks:
            buffer.copy_(buffers[name.replace("_checkpoint_wrapped_module.", "")])
        dist.broadcast(buffer, 0)
    if ranks.speaks:
        own: Any = policy.model
        own.generation_config = found.model.generation_config


def checkpoint_layers(policy: Sharded) -> Sharded:
    """Keeps the input of each layer only, and computes the rest again on the way back."""
    names = _layer_names(policy.model)
    apply_activation_checkpointing(
        policy.model, check_fn=lambda module: type(module).__name__ in names
    )
    return policy


def _layers(model: Any) -> list[Any]:
    names = _layer_names(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def _layer_names(model: Any) -> set[str]:
    names = set(model._no_split_modules or ())
    if not names:
        raise BapoError(
            f"{type(model).__name__} does not say what its layers are (_no_split_modules), so it "
            "can neither be sharded nor checkpoint them; train it in one process without"
        )
    return names
