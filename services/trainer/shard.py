"""Sharding a policy over the ranks (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from services.common.errors import BapoError
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks


def shard(policy: Policy, ranks: Ranks) -> Policy:
    """Places `policy` on this rank's device, sharded layer by layer.

    On GPUs it computes in bfloat16 from fp32 weights, and adds gradients up in fp32; on CPUs all is
    fp32. Gradients are summed over the ranks, not averaged: the loss is a share of the whole
    already. One process on a CPU has nothing to shard.
    """
    cuda = torch.cuda.is_available()
    if ranks.size == 1 and not cuda:
        return policy
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    policy.to(device)
    mesh = init_device_mesh(device.type, (ranks.size,))
    precision = MixedPrecisionPolicy()
    if cuda:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = _layers(policy.model)
    for each in (*layers, policy):
        fully_shard(each, mesh=mesh, mp_policy=precision)
        assert isinstance(each, FSDPModule)
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return policy


def checkpoint_layers(policy: Policy) -> Policy:
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
