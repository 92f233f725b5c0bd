"""Low-rank adapters (LoRA, by peft): the model's weights are frozen, small matrices are trained.

Published weights are the sum of both under the model's own names, so replicas and evaluations see a
plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bapo_core.config.training import LoraConfig
from bapo_core.errors import BapoError
from services.common.errors import first_line
from services.trainer.families import plain_name

_ADAPTER = "default"
_BASE = ".base_layer"


def add_adapters(model: nn.Module, settings: LoraConfig, seed: int) -> None:
    """Freezes `model` and injects adapters of `settings.rank`, in place.

    B starts at 0, so that the model computes the same as before; A is drawn from `seed`. With
    `settings.rank` 0, which stands for no adapters, nothing changes.

    Raises `BapoError` when `settings.targets` names no layer of the model, or a layer of experts.
    """
    if settings.rank == 0:
        return
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets: Any = settings.targets
    config = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            reason = first_line(error)
            raise BapoError(f"lora.targets {targets}: {reason}") from error
    _refuse_embeddings(model, targets)
    experts = [name for name, layer in model.named_modules() if hasattr(layer, "parameter_name")]
    if experts:
        raise BapoError(
            f"lora.targets {targets}: {experts[0]} holds the weights of several experts in one "
            "tensor, whose adapters cannot be merged into published weights; name other layers, "
            "such as [q_proj, k_proj, v_proj, o_proj]"
        )


def _refuse_embeddings(model: nn.Module, targets: Any) -> None:
    """Raises `BapoError` for adapters of layers whose weights are read and not called.

    The trainer computes log-probs from the weight of the output layer, so that adapters of it
    would never be trained, and adapters of embeddings have another form, which is not published.
    """
    read = {
        id(layer): kind
        for kind in ("input_embeddings", "output_embeddings")
        if (layer := getattr(model, f"get_{kind}", lambda: None)()) is not None
    }
    for name, layer in model.named_modules():
        is_embedding = hasattr(layer, "lora_embedding_A") and len(layer.lora_embedding_A) > 0
        if hasattr(layer, "lora_A") and (id(layer) in read or is_embedding):
            raise BapoError(
                f"lora.targets {targets}: the weight of {name} is read and not called, so its "
                "adapters would not be trained; name other layers, such as [q_proj, v_proj] or "
                "[all-linear]"
            )


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Yields (name, tensor, layer) of every weight of `model` but the adapters.

    The name is the one without adapters; the layer is the one whose adapters `merge_adapter` adds,
    or None. Tied tensors are the same object.
    """
    adapted = {
        f"{plain_name(name)}{_BASE}.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" not in name:
            yield name.replace(f"{_BASE}.", "."), tensor, adapted.get(name)


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the tensor, gathered from its shards if it is sharded. Every rank calls it."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def merge_adapter(tensor: Tensor, layer: Any) -> Tensor:
    """Returns a full weight plus the product of its layer's adapters. Every rank calls it.

    Frozen weights may be stored in bfloat16; the sum is in fp32.
    """
    base = full_tensor(tensor)
    if base.dtype == torch.bfloat16:
        base = base.float()
    if layer is None:
        return base
    down, up = (full_tensor(matrix[_ADAPTER].weight) for matrix in (layer.lora_A, layer.lora_B))
    return torch.addmm(base, up, down, alpha=layer.scaling[_ADAPTER])


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of `model` without frozen parameters, as checkpoints store it."""
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if id(tensor) not in frozen
    }
