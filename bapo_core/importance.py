"""Importance weights of the proximal over the behaviour policy, and metrics of their mismatch.

The behaviour policy sampled the tokens; the proximal policy is the denominator of the PPO ratio.
Both weights and metrics are constants: no gradient flows through them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bapo_core.numerics import MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def truncated_weights(
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 3.0,
    level: Level = "token",
) -> Tensor:
    """Returns min(prox / behaviour, cap) of each token, (N, T), detached; 0 where masked.

    `token`: the token's own ratio. `sequence`: the product over the response, unbiased but of high
    variance. `geometric`: the geometric mean over the response. The last two are equal for all
    tokens of a row, and truncated after the product or mean.
    """
    return _ratios(prox_logprobs, behavior_logprobs, mask, level).clamp(max=cap)


@torch.no_grad()
def mismatch_metrics(
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 3.0,
    level: Level = "token",
) -> dict[str, float]:
    """Measures the mismatch of behaviour and proximal policy over the valid tokens of (N, T).

    logprob_diff_mean, logprob_diff_max: |log prox - log behaviour|, in nats.
    mismatch_kl: KL(behaviour || prox), estimated by exp(d) - d - 1 (k3), in nats a token.
    ess_fraction: effective share of samples under the truncated weights, (sum w)^2 / (n sum w^2).
    truncated_fraction: share of tokens whose weight was above the cap.

    Without a valid token all are 0 except ess_fraction, which is 1.
    """
    valid = mask.bool()
    if not valid.any():
        return dict.fromkeys(_METRICS, 0.0) | {"ess_fraction": 1.0}
    difference = _log_ratio(prox_logprobs, behavior_logprobs, valid)[valid]
    ratios = _ratios(prox_logprobs, behavior_logprobs, mask, level)[valid]
    weights = ratios.clamp(max=cap)
    squares = len(weights) * weights.square().sum()
    metrics = (
        difference.abs().mean(),
        difference.abs().max(),
        # In double precision: in single, a small difference is lost in the rounding of exp.
        (torch.expm1(difference.double()) - difference.double()).mean(),
        # All weights may have underflowed to 0.
        torch.where(squares > 0, weights.sum().square() / squares, 0.0),
        (ratios > cap).float().mean(),
    )
    return {name: float(value) for name, value in zip(_METRICS, metrics, strict=True)}


_METRICS = (
    "logprob_diff_mean",
    "logprob_diff_max",
    "mismatch_kl",
    "ess_fraction",
    "truncated_fraction",
)


def _ratios(prox: Tensor, behavior: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Returns prox / behaviour at `level` for each token, (N, T); 0 where masked."""
    valid = mask.bool()
    log_ratio = _log_ratio(prox, behavior, valid)
    if level != "token":
        total = log_ratio.sum(dim=-1, keepdim=True)
        if level == "geometric":
            total = total / valid.sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(log_ratio)
    return torch.where(valid, log_ratio.exp(), 0.0)


def _log_ratio(prox: Tensor, behavior: Tensor, valid: Tensor) -> Tensor:
    """Returns log prox - log behaviour, clamped to +/-MAX_LOG_RATIO; 0 where masked."""
    difference = torch.where(valid, prox - behavior, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
