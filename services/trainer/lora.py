"""Low-rank adapters: the model's weights stay, and small matrices beside them are trained.

peft puts them into the model. What is published is the sum of both, under the model's own names, so
nobody else knows of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bapo_core.config import LoraConfig
from bapo_core.errors import BapoError

_ADAPTER = "default"
_WRAPPER = "_checkpoint_wrapped_module."
_BASE = ".base_layer"


def add_adapters(model: nn.Module, settings: LoraConfig, seed: int) -> None:
    """Freezes `model` and puts adapters into it, in place; nothing with rank 0.

    B starts at 0, so that the model does what it did; A is drawn from `seed`.
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
            reason = str(error).splitlines()[0]
            raise BapoError(f"lora.targets {targets}: {reason}") from error


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Every weight of `model`: its name without adapters, its tensor, and the layer whose adapters
    are to be added to it, or None. Tensors that are tied are the same object."""
    adapted = {
        f"{name.replace(_WRAPPER, '')}{_BASE}.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" not in name:
            yield name.replace(f"{_BASE}.", "."), tensor, adapted.get(name)


def whole(tensor: Tensor) -> Tensor:
    """Every rank must call it for a tensor that is sharded."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def merged(tensor: Tensor, layer: Any) -> Tensor:
    """The whole of a weight with what its layer's adapters add to it."""
    base = whole(tensor)
    if layer is None:
        return base
    down, up = (whole(part[_ADAPTER].weight) for part in (layer.lora_A, layer.lora_B))
    return torch.addmm(base, up, down, alpha=layer.scaling[_ADAPTER])


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of `model`: all but frozen parameters."""
    frozen = {id(each) for each in model.parameters() if not each.requires_grad}
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if id(tensor) not in frozen
    }
