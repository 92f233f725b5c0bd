"""Estimators of KL(pi_theta || pi_ref) by token, from log-probs of the sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bapo_core.numerics import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3", "iw"]

# The authors' code clamps k3 to +/-10; k3 is never negative.
_MAX_K3 = 10.0


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: Estimator
) -> Tensor:
    """Returns the KL penalty of each token in nats, (N, T) or packed (T,); 0 where masked.

    With d = log pi_theta - log pi_ref and rho = exp(d):

    k1: d. Unbiased for samples of pi_theta; its gradient is not the KL's.
    k2: d^2 / 2. Biased, low variance.
    k3: exp(-d) + d - 1. Unbiased for samples of pi_theta only; at most 10, as in the authors' code.
    iw: rho log rho - rho + 1. Unbiased for samples of pi_ref, so for the KL to the rollout policy
        (Eq. 3).

    d is clamped to +/-`MAX_LOG_RATIO` under an exponential. Masked values may be NaN.
    """
    d = torch.where(mask.bool(), logprobs - ref_logprobs, 0.0)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k3":
        return ((-d).exp() + d - 1.0).clamp(max=_MAX_K3)
    rho = d.exp()
    return rho * d - rho + 1.0
