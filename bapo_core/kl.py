"""Estimates of KL(pi_theta || pi_ref) per token, from log-probs of the sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "iw"]

# exp(20) is finite, and so is its product with 20.
_LARGEST_LOG_RATIO = 20.0
# The authors' code clamps k3 to +/-10; k3 is never negative.
_LARGEST_K3 = 10.0


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: Estimator
) -> Tensor:
    """The penalty of each token in nats, (N, T) or packed (T,); 0 where masked, whatever is there.

    With d = log pi_theta - log pi_ref and rho = exp(d):

    k1: d. Unbiased for samples of pi_theta; its gradient is not the KL's.
    k2: d^2 / 2. Biased, low variance.
    k3: exp(-d) + d - 1. Unbiased for samples of pi_theta only; at most 10, as in the authors' code.
    iw: rho log rho - rho + 1. Unbiased for samples of pi_ref, so for KL to the rollout policy
        (Eq. 3), which made them.

    d is clamped to +/-20 under an exponential.
    """
    d = torch.where(mask.bool(), logprobs - ref_logprobs, 0.0)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    d = d.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    if estimator == "k3":
        return ((-d).exp() + d - 1.0).clamp(max=_LARGEST_K3)
    rho = d.exp()
    return rho * d - rho + 1.0
