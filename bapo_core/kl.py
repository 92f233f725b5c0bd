"""Estimators of KL(pi_theta || pi_ref) by token, from log-probs of the sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bapo_core.numerics import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3", "k3_corrected", "iw"]

# The authors' code clamps k3 to +/-10; k3 is never negative.
_MAX_K3 = 10.0


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: Estimator,
) -> Tensor:
    """Returns the KL penalty of each token in nats, (N, T) or packed (T,); 0 where masked.

    With d = log pi_theta - log pi_ref and w = pi_theta / pi_behavior, of the policy that sampled
    the tokens:

    k1: d. Unbiased for samples of pi_theta; its gradient is not the KL's.
    k2: d^2 / 2. Biased, low variance.
    k3: exp(-d) + d - 1. Unbiased for samples of pi_theta only; at most 10, as in the authors' code.
    k3_corrected: w k3. Unbiased for any behaviour policy, up to k3's limit of 10 (DeepSeek-V3.2;
        TRL's `use_bias_correction_kl`).
    iw: w d - w + 1. Unbiased for any behaviour policy, and so is its gradient; where that is the
        reference, rho log rho - rho + 1 with rho = exp(d).

    Log-ratios are clamped to +/-`MAX_LOG_RATIO` under an exponential. Masked values may be NaN.
    """
    valid = mask.bool()
    d = torch.where(valid, logprobs - ref_logprobs, 0.0)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = ((-d).exp() + d - 1.0).clamp(max=_MAX_K3)
    if estimator == "k3":
        return k3
    log_weight = torch.where(valid, logprobs - behavior_logprobs, 0.0)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if estimator == "k3_corrected":
        return weight * k3
    return weight * d - weight + 1.0
