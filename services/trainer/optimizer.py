"""The optimizer of whatever is trained."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW

from bapo_core.config import OptimizerConfig


def make_optimizer(module: nn.Module, learning_rate: float, settings: OptimizerConfig) -> AdamW:
    """AdamW on what is not frozen."""
    return AdamW(
        [each for each in module.parameters() if each.requires_grad],
        lr=learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
