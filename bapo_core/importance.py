"""Importance weights from the behaviour policy to the proximal one, and how far apart they are.

Both weights and metrics are constants: no gradient flows through them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence", "geometric"]

# exp(20) exceeds any sensible cap, and its square is finite in float32.
_LARGEST_LOG_RATIO = 20.0


@torch.no_grad()
def truncated_weights(
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 3.0,
    level: Level = "token",
) -> Tensor:
    """min(prox / behaviour, cap) for each token, (N, T), detached; 0 where masked.

    `token`: the token's own ratio. `sequence`: the product over the response, unbiased but of high
    variance. `geometric`: the geometric mean over the response. The last two are the same for all
    tokens of a row, and truncated once, as a whole.
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
    """How far the behaviour policy is from the proximal one, over the valid tokens of (N, T).

    logprob_diff_mean, logprob_diff_max: |log prox - log behaviour|, in nats.
    mismatch_kl: KL(behaviour || prox), estimated by exp(d) - d - 1 (k3), in nats a token.
    ess_fraction: effective share of samples under the truncated weights, (sum w)^2 / (n sum w^2).
    truncated_fraction: share of tokens whose weight was above the cap.

    Without a valid token: no difference, nothing truncated, an ess_fraction of 1.
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
        # Of small differences little more than rounding would be left in single precision.
        (torch.expm1(difference.double()) - difference.double()).mean(),
        # All weights 0: no sample is left.
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
    """prox / behaviour at `level`, given to each token; (N, T), 0 where masked."""
    valid = mask.bool()
    log_ratio = _log_ratio(prox, behavior, valid)
    if level != "token":
        total = log_ratio.sum(dim=-1, keepdim=True)
        if level == "geometric":
            total = total / valid.sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = total.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).expand_as(log_ratio)
    return torch.where(valid, log_ratio.exp(), 0.0)


def _log_ratio(prox: Tensor, behavior: Tensor, valid: Tensor) -> Tensor:
    """log prox - log behaviour, clamped to +/-20; 0 where masked."""
    difference = torch.where(valid, prox - behavior, 0.0)
    return difference.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
