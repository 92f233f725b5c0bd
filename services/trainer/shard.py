"""Shards a policy or critic over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface

from bapo_core.config import TrainerConfig
from bapo_core.errors import BapoError
from services.trainer import attention
from services.trainer.critic import Critic
from services.trainer.policy import Policy, empty_policy, load_policy, plain_name
from services.trainer.ranks import Ranks

Sharded = TypeVar("Sharded", Policy, Critic)
DEFAULT = TrainerConfig()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Computes in bf16 and reduces gradients in fp32; used on GPUs."""


def shard(policy: Sharded, ranks: Ranks, *, offload: bool = False) -> Sharded:
    """Places `policy` on this rank's device, sharded layer by layer, in place.

    On GPUs it computes in bfloat16 from fp32 weights and reduces gradients in fp32; on CPUs all is
    fp32. Gradients are summed over the ranks, not averaged: each rank's loss already is its share
    of the whole. One process on a CPU has nothing to shard.
    """
    cuda = torch.cuda.is_available()
    if ranks.size == 1 and not cuda:
        return policy
    mesh = init_device_mesh("cuda" if cuda else "cpu", (ranks.size,))
    precision = HALF if cuda else MixedPrecisionPolicy()
    offload_policy = CPUOffloadPolicy(pin_memory=cuda) if offload else OffloadPolicy()
    # From the inside out: some models name a layer and a part of it.
    modules: list[nn.Module] = [*reversed(_layers(policy.model)), policy]
    for module in modules:
        # Moves the module to the device before sharding it: one full layer at a time is there.
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return policy


def load_sharded(
    directory: Path,
    ranks: Ranks,
    *,
    prepare: Callable[[Policy], Sharded],
    settings: TrainerConfig = DEFAULT,
) -> Sharded:
    """Loads the model of a directory, sharded over the ranks. Every rank calls it.

    prepare: makes the module to be sharded from the policy, in the same way on every rank.

    Rank 0 reads the model and broadcasts it a tensor at a time: the full model is in memory once,
    however many ranks there are, and every rank has its shards besides.
    """
    full = prepare(load_policy(directory)) if ranks.is_main else None
    if full is not None and ranks.size == 1:
        sharded = full
    else:
        sharded = prepare(empty_policy(directory))
    checkpoint_layers(sharded, settings.gradient_checkpointing)
    if settings.compile:
        compile_layers(sharded)
    shard(sharded, ranks, offload=settings.offload)
    if ranks.size > 1:
        broadcast_weights(full, sharded, ranks)
    return sharded


def broadcast_weights(full: Sharded | None, sharded: Sharded, ranks: Ranks) -> None:
    """Fills the ranks' empty shards with the weights of `full`, which only rank 0 has."""
    source: Any = full
    set_model_state_dict(
        sharded.model,
        source.model.state_dict() if ranks.is_main else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    # State dicts leave out what a model computes once, such as rotary frequencies.
    buffers = dict(source.model.named_buffers()) if ranks.is_main else {}
    for name, buffer in sharded.model.named_buffers():
        if ranks.is_main:
            buffer.copy_(buffers[plain_name(name)])
        dist.broadcast(buffer, 0)
    if ranks.is_main:
        model: Any = sharded.model
        model.generation_config = source.model.generation_config


def checkpoint_layers(policy: Sharded, mode: Literal["none", "selective", "full"]) -> Sharded:
    """Turns on activation checkpointing of each layer, in place.

    `full` keeps a layer's input alone; `selective` keeps the results of `_SAVED_OPS` too. The
    backward pass computes the rest again.
    """
    if mode == "none":
        return policy
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = _selective_checkpoint_contexts
    names = _layer_names(policy.model)
    apply_activation_checkpointing(
        policy.model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, **options),
        check_fn=lambda module: type(module).__name__ in names,
    )
    return policy


def _selective_checkpoint_contexts() -> Any:
    return create_selective_checkpoint_contexts(list(_SAVED_OPS))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose results `selective` keeps: matrix products and attention."""


def compile_layers(policy: Sharded) -> Sharded:
    """Compiles each layer but its attention, whose shapes differ from pass to pass; in place."""
    uncompiled = torch.compiler.disable(attention.packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(attention.IMPLEMENTATION, uncompiled)
    for layer in _layers(policy.model):
        layer.compile(dynamic=True)
    return policy


def _layers(model: Any) -> list[Any]:
    names = _layer_names(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def _layer_names(model: Any) -> set[str]:
    names = set(model._no_split_modules or ())
    if not names:
        raise BapoError(
            f"{type(model).__name__} does not name its layers (_no_split_modules), which sharding, "
            "GPUs, trainer.gradient_checkpointing and trainer.compile need; choose another model, "
            "or train it in one process on a CPU without them"
        )
    return names
