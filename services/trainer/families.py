"""Parts of models, and what single model families do differently in and around their attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from services.model.layers import has_recurrent_layers

_LOGIT_DIVISORS = ("logits_scaling",)
_LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Configuration keys of numbers by which models divide or multiply the output layer's logits."""
_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration keys of the bound of models that cap their logits softly."""
_WINDOW_IN_MASK = ("phimoe",)
"""Types of models that apply their sliding window through the mask alone."""
_NO_BOUNDS = ("nemotron",)
"""Types of models that pass nothing on to their attention, such as the bounds of sequences."""


def logit_factor(config: Any) -> float:
    """Returns the number by which a model multiplies the logits of its output layer."""
    text = config.get_text_config()
    factor = 1.0
    for name in _LOGIT_FACTORS:
        factor *= getattr(text, name, None) or 1.0
    for name in _LOGIT_DIVISORS:
        factor /= getattr(text, name, None) or 1.0
    return factor


def logit_cap(config: Any) -> float | None:
    """Returns the bound c if a model replaces its logits l by c tanh(l / c), and otherwise None."""
    text = config.get_text_config()
    caps = (getattr(text, name, None) for name in _LOGIT_CAPS)
    return next((float(cap) for cap in caps if cap is not None), None)


def is_packable(model_class: Any, config: Any) -> bool:
    """Whether packed attention can take the place of the attention of every layer.

    It cannot where attention has soft caps or sinks, which PyTorch's own attention lacks, too.
    """
    text = config.get_text_config()
    return (
        getattr(model_class, "_supports_attention_backend", False)
        and model_class._supports_sdpa
        and not has_recurrent_layers(model_class, config)
        and "chunked_attention" not in (getattr(text, "layer_types", None) or ())
        and text.model_type not in _NO_BOUNDS
        and not (text.model_type in _WINDOW_IN_MASK and text.sliding_window)
    )


def plain_name(name: str) -> str:
    """Returns a parameter's name without the wrappers of gradient checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def device_of(module: nn.Module) -> torch.device:
    """Returns the device that `module` computes on; offloaded shards are on the CPU meanwhile."""
    parameter = next(module.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def base_model_of(model: Any) -> Any:
    """Returns the model without its output layer."""
    # The prefix of Llama 4's language model names none of its parts.
    return model.model if model.base_model is model else model.base_model


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(submodule, FSDPModule) for submodule in module.modules())
