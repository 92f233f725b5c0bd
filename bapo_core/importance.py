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
Mode = Literal["truncate", "mask", "unit"]


@torch.no_grad()
def truncated_weights(
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 3.0,
    floor: float = 0.0,
    mode: Mode = "truncate",
    level: Level = "token",
) -> Tensor:
    """Returns prox / behaviour of each token within [floor, cap], (N, T), detached; 0 where masked.

    `truncate` moves a weight outside of the bounds to the bound (TIS); `mask` sets it to 0, so that
    the token has no policy loss (IcePop, with bounds 0.5 and 2). `unit` makes all weights 1.

    `token`: the token's own ratio. `sequence`: the product over the response, unbiased but of high
    variance. `geometric`: the geometric mean over the response. The last two are equal for all
    tokens of a row, and bounded after the product or mean.
    """
    ratios = _ratios(prox_logprobs, behavior_logprobs, mask, level)
    return torch.where(mask.bool(), _bounded(ratios, cap, floor, mode), 0.0)


@torch.no_grad()
def mismatch_metrics(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Measures the mismatch of a policy and the behaviour policy over the valid tokens of (N, T).

    logprob_diff_mean, logprob_diff_max: |log policy - log behaviour|, in nats.
    mismatch_kl: KL(behaviour || policy), estimated by exp(d) - d - 1 (k3), in nats a token.

    All are 0 without a valid token.
    """
    valid = mask.bool()
    if not valid.any():
        return {"logprob_diff_mean": 0.0, "logprob_diff_max": 0.0, "mismatch_kl": 0.0}
    difference = _log_ratio(logprobs, behavior_logprobs, valid)[valid]
    # In double precision: in single, a small difference is lost in the rounding of exp.
    kl = torch.expm1(difference.double()) - difference.double()
    return {
        "logprob_diff_mean": float(difference.abs().mean()),
        "logprob_diff_max": float(difference.abs().max()),
        "mismatch_kl": float(kl.mean()),
    }


@torch.no_grad()
def weight_metrics(
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 3.0,
    floor: float = 0.0,
    mode: Mode = "truncate",
    level: Level = "token",
) -> dict[str, float]:
    """Describes the weights that `truncated_weights` returns for the same arguments.

    ess_fraction: effective share of samples under the weights, (sum w)^2 / (n sum w^2).
    truncated_fraction: share of tokens whose weight was outside of [floor, cap].

    Without a valid token they are 1 and 0.
    """
    valid = mask.bool()
    if not valid.any():
        return {"ess_fraction": 1.0, "truncated_fraction": 0.0}
    ratios = _ratios(prox_logprobs, behavior_logprobs, mask, level)[valid]
    weights = _bounded(ratios, cap, floor, mode)
    squares = len(weights) * weights.square().sum()
    # All weights may have underflowed to 0, or been masked.
    ess = torch.where(squares > 0, weights.sum().square() / squares, 0.0)
    return {
        "ess_fraction": float(ess),
        "truncated_fraction": float(((ratios > cap) | (ratios < floor)).float().mean()),
    }


def _bounded(ratios: Tensor, cap: float, floor: float, mode: Mode) -> Tensor:
    if mode == "unit":
        return torch.ones_like(ratios)
    bounded = ratios.clamp(floor, cap)
    return bounded if mode == "truncate" else torch.where(bounded == ratios, ratios, 0.0)


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
