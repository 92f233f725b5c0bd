"""Shards a policy or critic over the ranks (FSDP2)."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch._dynamo
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
from torch.utils._triton import has_triton
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoConfig

from bapo_core.config.training import TrainerConfig
from bapo_core.errors import BapoError
from services.trainer import attention
from services.trainer.attention_kernels import Needs, choose_kernels
from services.trainer.critic import Critic
from services.trainer.families import plain_name
from services.trainer.load_policy import empty_policy, load_policy
from services.trainer.memory import MemoryPlan, ModelSize
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks

log = logging.getLogger(__name__)

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
    plan: Callable[[ModelSize | None], MemoryPlan] | None = None,
) -> Sharded:
    """Loads the model of a directory, sharded over the ranks. Every rank calls it.

    prepare: makes the module to be sharded from the policy, in the same way on every rank. plan:
    returns how a step fits the memory, whose checkpointing replaces that of `settings`.

    Rank 0 reads the model and broadcasts it a tensor at a time: the full model is in memory once,
    however many ranks there are, and every rank has its shards besides.
    """
    full = prepare(load_policy(directory)) if ranks.is_main else None
    if full is not None and ranks.size == 1:
        sharded = full
    else:
        sharded = prepare(empty_policy(directory))
    kinds = ranks.from_main(
        lambda: [] if full is None else list(map(astuple, full.attention_kinds))
    )
    choose_attention(frozenset(Needs(*kind) for kind in kinds), settings.attention, ranks)
    halved = False
    if torch.cuda.is_available():
        halved = halve_frozen(sharded, directory)
        if full is not None and full is not sharded:
            halve_frozen(full, directory)  # what is broadcast has the dtypes of the shards
    checkpointing = settings.gradient_checkpointing
    if plan is not None:
        checkpointing = plan(size_of(sharded.model, half_frozen=halved)).checkpointing
    checkpoint_layers(sharded, "none" if checkpointing == "auto" else checkpointing)
    if compiles(settings, sharded.model):
        compile_layers(sharded)
    shard(sharded, ranks, offload=settings.offload)
    if ranks.size > 1:
        broadcast_weights(full, sharded, ranks)
    return sharded


def size_of(model: Any, *, half_frozen: bool) -> ModelSize | None:
    """Returns the sizes of a model; None if it does not name its layers."""
    if not model._no_split_modules:
        return None
    return ModelSize.of(model, _layers(model), half_frozen=half_frozen)


def halve_frozen(policy: Sharded, directory: Path) -> bool:
    """Stores frozen weights in bfloat16, in place, if the model's files do; returns whether it did.

    The values are the same, and the GPU computes with them in bfloat16 anyway.
    """
    frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if not frozen or getattr(config, "dtype", None) not in (torch.bfloat16, "bfloat16"):
        return False
    for parameter in frozen:
        parameter.data = parameter.data.to(torch.bfloat16)
    return True


def choose_attention(kinds: Iterable[Needs], name: str, ranks: Ranks) -> None:
    """Chooses this rank's kernels for the model's kinds of attention; rank 0 logs the choice."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        kinds = [replace(needs, dtype=HALF.param_dtype or needs.dtype) for needs in kinds]
    choices = choose_kernels(kinds, device, name)
    if ranks.is_main and cuda:
        for choice in choices:
            log.info("attention: %s", choice)


def compiles(settings: TrainerConfig, model: Any) -> bool:
    """Returns whether the layers are compiled, by `trainer.compile`.

    `auto` compiles on GPUs where PyTorch's compiler has what it needs; a line of the log says what
    is missing elsewhere.
    """
    if settings.compile != "auto":
        return settings.compile
    if not torch.cuda.is_available() or settings.gradient_checkpointing == "selective":
        return False
    problem = None
    if not model._no_split_modules:
        problem = f"{type(model).__name__} does not name its layers"
    elif not has_triton():
        problem = "Triton is missing or does not know the GPU"
    elif shutil.which("cc") is None and shutil.which("gcc") is None and "CC" not in os.environ:
        problem = "there is no C compiler (gcc)"
    if problem is not None:
        log.warning("the layers are not compiled: %s; training is a quarter slower", problem)
    return problem is None


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


def _varlen_operations() -> list[Any]:
    """Returns the operation of `varlen_attn`, which its module registers (from PyTorch 2.10 on)."""
    if find_spec("torch.nn.attention.varlen") is None:
        return []
    import_module("torch.nn.attention.varlen")
    return [torch.ops.torch_attn._varlen_attn.default]


_aten = torch.ops.aten
_SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    *_varlen_operations(),
)
"""Operations whose results `selective` keeps: matrix products and attention."""


def compile_layers(policy: Sharded, backend: Any = "inductor") -> Sharded:
    """Compiles each layer but its attention, whose shapes differ from pass to pass; in place."""
    # Numbers of a layer, such as the epsilon of a norm or the scale of an adapter, are constants.
    # With `dynamic`, each would be a tensor on the CPU, which a C++ program converts.
    torch._dynamo.config.specialize_float = True
    uncompiled = torch.compiler.disable(attention.packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(attention.IMPLEMENTATION, uncompiled)
    for layer in _layers(policy.model):
        layer.compile(dynamic=True, backend=backend)
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
