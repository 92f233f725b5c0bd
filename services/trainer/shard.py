"""Sharding a policy over the ranks (FSDP2)."""

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
from services.trainer.policy import Policy, empty_policy, load_policy
from services.trainer.ranks import Ranks

Sharded = TypeVar("Sharded", Policy, Critic)
DEFAULT = TrainerConfig()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Of GPUs."""


def shard(policy: Sharded, ranks: Ranks, *, offload: bool = False) -> Sharded:
    """Places `policy` on this rank's device, sharded layer by layer.

    On GPUs it computes in bfloat16 from fp32 weights, and adds gradients up in fp32; on CPUs all is
    fp32. Gradients are summed over the ranks, not averaged: the loss is a share of the whole
    already. One process on a CPU has nothing to shard.
    """
    cuda = torch.cuda.is_available()
    if ranks.size == 1 and not cuda:
        return policy
    mesh = init_device_mesh("cuda" if cuda else "cpu", (ranks.size,))
    precision = HALF if cuda else MixedPrecisionPolicy()
    place = CPUOffloadPolicy(pin_memory=cuda) if offload else OffloadPolicy()
    modules: list[nn.Module] = [*_layers(policy.model), policy]
    for each in modules:
        # Moves what it shards to the device: a layer at a time is there as a whole.
        fully_shard(each, mesh=mesh, mp_policy=precision, offload_policy=place)
        assert isinstance(each, FSDPModule)
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return policy


def load_sharded(
    directory: Path,
    ranks: Ranks,
    *,
    prepare: Callable[[Policy], Sharded],
    settings: TrainerConfig = DEFAULT,
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
        sharded = prepare(empty_policy(directory))
    checkpoint_layers(sharded, settings.gradient_checkpointing)
    if settings.compile:
        compile_layers(sharded)
    shard(sharded, ranks, offload=settings.offload)
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


def checkpoint_layers(policy: Sharded, what: Literal["none", "selective", "full"]) -> Sharded:
    """Computes again on the way back what is not kept of each layer: everything but its input, or
    what is cheap."""
    if what == "none":
        return policy
    options: dict[str, Any] = {}
    if what == "selective":
        options["context_fn"] = _keeping_what_is_dear
    names = _layer_names(policy.model)
    apply_activation_checkpointing(
        policy.model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, **options),
        check_fn=lambda module: type(module).__name__ in names,
    )
    return policy


def _keeping_what_is_dear() -> Any:
    return create_selective_checkpoint_contexts(list(_DEAR))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_DEAR = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose results `selective` keeps."""


def compile_layers(policy: Sharded) -> Sharded:
    """Compiles each layer but its attention, whose shapes differ each time."""
    whole = torch.compiler.disable(attention.packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(attention.IMPLEMENTATION, whole)
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
            f"{type(model).__name__} does not say what its layers are (_no_split_modules), so it "
            "can neither be sharded nor checkpoint them; train it in one process without"
        )
    return names
