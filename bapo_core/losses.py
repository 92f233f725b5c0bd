"""Policy losses. All are minimised, and per token until `aggregate` makes them one number.

Log-probs are natural logarithms. A mask is true (or 1) where a token counts. What stands at masked
positions never matters, NaN and infinity included: results and gradients there are 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean"]

# exp(20) is far beyond any clip, and finite: no 0 * inf where an advantage is 0.
_LARGEST_LOG_RATIO = 20.0
# GSPO's reference clamps the log of a sequence's ratio here.
_LARGEST_SEQUENCE_LOG_RATIO = 10.0


def clipped_surrogate(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    clip_center: Tensor | None = None,
) -> Tensor:
    """PPO's loss per token, -w min(r A, clip(r) A), with r = exp(logprobs - prox_logprobs).

    All tensors have one shape, (N, T) or packed (T,), or broadcast to it.

    clip_low, clip_high: r is clipped to [center - clip_low, center + clip_high].
    clip_center: 1 if None; theta_t / behaviour for delayed GRPO, where r = theta / behaviour.
    dual_clip: bounds the loss by -dual_clip * A where A < 0, where r alone is unbounded.
    weights: detached importance weights that multiply each token (`importance`).
    """
    valid = mask.bool()
    ratio = _ratio(logprobs, prox_logprobs, valid)
    clipped = _clip(ratio, clip_center, clip_low, clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    if weights is not None:
        loss = loss * weights
    return torch.where(valid, loss, 0.0)


@torch.no_grad()
def clipped_tokens(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_center: Tensor | None = None,
) -> Tensor:
    """The valid tokens whose gradient the clip cuts off, a mask (N, T); arguments as above."""
    valid = mask.bool()
    ratio = _ratio(logprobs, prox_logprobs, valid)
    clipped = _clip(ratio, clip_center, clip_low, clip_high)
    return (-clipped * advantages > -ratio * advantages) & valid


def clip_fraction(cut: Tensor, mask: Tensor) -> float:
    """Share of the valid tokens that `clipped_tokens` are."""
    return float(cut.sum()) / max(1, int(mask.bool().sum()))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's ratio of each sequence, exp(mean over tokens of log pi - log pi_old).

    Log-probs and mask are (N, T), the result (N, 1). The mean is clamped at 10. The gradient flows
    through it to every token of the sequence, so with "seq-mean-token-mean" it is GSPO's:

        s = sequence_ratio(logprobs, old_logprobs, mask)
        loss = clipped_surrogate(s.log(), torch.zeros_like(s), advantages, mask, ...)
    """
    valid = mask.bool()
    log_ratio = torch.where(valid, logprobs - old_logprobs, 0.0)
    mean = log_ratio.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    # The lower end only keeps log(s) finite.
    return mean.clamp(-_LARGEST_LOG_RATIO, _LARGEST_SEQUENCE_LOG_RATIO).exp()


def aggregate(loss: Tensor, mask: Tensor, mode: Aggregation) -> Tensor:
    """One number from token losses (N, T): their sum under `token_scale`."""
    return (torch.where(mask.bool(), loss, 0.0) * token_scale(mask, mode)).sum()


def token_scale(mask: Tensor, mode: Aggregation, *, count: int | None = None) -> Tensor:
    """(N, T): what each token's loss is multiplied by in the aggregate; 0 where masked.

    `token-mean` weighs every valid token equally (DAPO). `seq-mean-token-mean` weighs every
    sequence equally, by the mean over its tokens (Eq. 1); sequences without a valid token do not
    count. Without any valid token the result is 0.

    count: what `scale_count` says of the whole, where `mask` is a part of it. With it, the sum over
    parts equals the whole, however the rows are split.
    """
    valid = mask.bool()
    whole = max(1, scale_count(mask, mode) if count is None else count)
    if mode == "token-mean":
        return valid / torch.tensor(float(whole))
    return valid / (valid.sum(dim=1, keepdim=True) * whole).clamp(min=1)


def scale_count(mask: Tensor, mode: Aggregation) -> int:
    """What the aggregate is a mean over: valid tokens, or sequences with a valid token."""
    valid = mask.bool()
    return int(valid.sum() if mode == "token-mean" else valid.any(dim=1).sum())


def _ratio(logprobs: Tensor, prox_logprobs: Tensor, valid: Tensor) -> Tensor:
    # Masked here and not only at the end: a gradient of 0 * NaN is stopped on its way back.
    log_ratio = torch.where(valid, logprobs - prox_logprobs, 0.0)
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()


def _clip(ratio: Tensor, center: Tensor | None, low: float, high: float) -> Tensor:
    if center is None:
        return ratio.clamp(1.0 - low, 1.0 + high)
    return torch.minimum(torch.maximum(ratio, center - low), center + high)
