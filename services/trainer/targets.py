"""Targets of a step's loss, and the results of each token that was trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.critic import ValueTargets
from services.trainer.data import Batch


@dataclass(frozen=True, slots=True)
class Targets:
    """Constants of a step's loss (Eq. 3), (N, R) each."""

    mask: Tensor
    """Tokens that have a loss: those of all responses, or only of complete ones."""
    advantages: Tensor
    proximal_logprobs: Tensor
    """Log-probs in the denominator of the PPO ratio, by `loss.ratio`."""
    weights: Tensor
    """Importance weights: proximal over behaviour, within bounds."""
    reference_logprobs: Tensor
    """Log-probs of the policy that the KL is taken to."""
    center: Tensor | None
    """Centre of the clip range, where it is not 1."""
    current_logprobs: Tensor
    """Log-probs under theta_t, the policy before this step's first update."""
    reference_share: float = 1.0
    """Share of the KL to the reference; the rest is to theta_t."""
    values: ValueTargets | None = None
    """Targets of the critic; None without one."""


@dataclass(frozen=True, slots=True)
class TokenResults:
    """Results of each token at the time it was trained on, (N, R); updates fill in their rows."""

    logprobs: Tensor
    clipped: Tensor
    """Whether the objective cut the token's gradient off, or bounded its weight."""

    @classmethod
    def empty(cls, batch: Batch) -> TokenResults:
        """Returns zeros in the shape of `batch`."""
        return cls(torch.zeros_like(batch.behavior_logprobs), torch.zeros_like(batch.mask))
