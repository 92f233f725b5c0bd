"""Policy losses, by token and to be minimised, and their aggregation into one number.

Log-probs are natural logarithms. A mask is true (or 1) at valid tokens. Values at masked positions
have no influence, NaN and infinity included: results and gradients there are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bapo_core.numerics import MAX_LOG_RATIO

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "aggregate",
    "clip_fraction",
    "clipped_surrogate",
    "clipped_tokens",
    "scale_count",
    "sequence_ratio",
    "token_scale",
]

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]

# GSPO's reference implementation clamps the log of a sequence's ratio here.
_MAX_SEQUENCE_LOG_RATIO = 10.0


def clipped_surrogate(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    clip_center: Tensor | None = None,
) -> Tensor:
    """Returns PPO's loss by token, -w min(r A, clip(r) A), r = exp(logprobs - prox_logprobs).

    All tensors have one shape, (N, T) or packed (T,), or broadcast to it.

    clip_low, clip_high: r is clipped to [center - clip_low, center + clip_high]; None sets no
        bound.
    clip_center: 1 if None; theta_t / behaviour for delayed GRPO, where r = theta / behaviour.
    dual_clip: bounds the loss by -dual_clip * A where A < 0; the loss is otherwise unbounded in r.
    weights: detached importance weights w of the tokens (`importance`).
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
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    clip_center: Tensor | None = None,
) -> Tensor:
    """Returns a mask (N, T) of the valid tokens that have no gradient because they are clipped.

    The arguments are those of `clipped_surrogate`.
    """
    valid = mask.bool()
    ratio = _ratio(logprobs, prox_logprobs, valid)
    clipped = _clip(ratio, clip_center, clip_low, clip_high)
    without_gradient = -clipped * advantages > -ratio * advantages
    if dual_clip is not None:
        loss = torch.maximum(-ratio * advantages, -clipped * advantages)
        without_gradient |= (advantages < 0) & (loss > -dual_clip * advantages)
    return without_gradient & valid


def clip_fraction(clipped: Tensor, mask: Tensor) -> float:
    """Returns the share of valid tokens that `clipped_tokens` returns as clipped."""
    return float(clipped.sum()) / max(1, int(mask.bool().sum()))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns GSPO's ratio of each sequence, exp(mean over tokens of log pi - log pi_old).

    Log-probs and mask are (N, T), the result is (N, 1). The mean is clamped at 10. The gradient
    flows through it to every token of the sequence; with "seq-mean-token-mean" the loss is GSPO's:

        s = sequence_ratio(logprobs, old_logprobs, mask)
        loss = clipped_surrogate(s.log(), torch.zeros_like(s), advantages, mask, ...)
    """
    valid = mask.bool()
    log_ratio = torch.where(valid, logprobs - old_logprobs, 0.0)
    mean = log_ratio.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    # The lower bound only keeps log(s) finite.
    return mean.clamp(-MAX_LOG_RATIO, _MAX_SEQUENCE_LOG_RATIO).exp()


def token_mean(valid: Tensor, longest: int) -> tuple[Tensor, int]:
    """Weighs every valid token equally (DAPO, arXiv 2503.14476).

        sum over all tokens of loss / number of all tokens

    A long response weighs more than a short one.
    """
    return torch.ones(len(valid), 1, dtype=torch.long), int(valid.sum())


def sequence_mean_of_token_mean(valid: Tensor, longest: int) -> tuple[Tensor, int]:
    """Weighs every sequence equally, by the mean over its tokens (GRPO, arXiv 2402.03300).

        mean over sequences of (sum over its tokens of loss / number of its tokens)

    A token of a long response weighs less than one of a short response.
    """
    return valid.sum(dim=1, keepdim=True), _sequences(valid)


def sequence_mean_of_token_sum(valid: Tensor, longest: int) -> tuple[Tensor, int]:
    """Takes a sequence as one action, whose log-prob is a sum (RLOO, arXiv 2402.14740).

        mean over sequences of (sum over its tokens of loss)

    The gradient grows with the length of responses.
    """
    return torch.ones(len(valid), 1, dtype=torch.long), _sequences(valid)


def sequence_mean_of_normed_token_sum(valid: Tensor, longest: int) -> tuple[Tensor, int]:
    """Divides sums by one constant, so that length has no influence (Dr. GRPO, arXiv 2503.20783).

        mean over sequences of (sum over its tokens of loss / max_response_tokens)

    All tokens weigh the same, whatever the lengths of the batch's responses.
    """
    return torch.full((len(valid), 1), longest), _sequences(valid)


AGGREGATIONS: dict[Aggregation, Callable[[Tensor, int], tuple[Tensor, int]]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": sequence_mean_of_token_mean,
    "seq-mean-token-sum": sequence_mean_of_token_sum,
    "seq-mean-token-sum-norm": sequence_mean_of_normed_token_sum,
}
"""Name of an aggregation -> function of (valid tokens (N, T), longest response) that returns the
number by which a token's loss is divided in its sequence, (N, 1), and the count by which the sum of
all sequences is divided."""


def aggregate(loss: Tensor, mask: Tensor, mode: Aggregation, *, longest: int = 1) -> Tensor:
    """Returns one number for token losses (N, T): their sum, each times its `token_scale`."""
    scale = token_scale(mask, mode, longest=longest)
    return (torch.where(mask.bool(), loss, 0.0) * scale).sum()


def token_scale(
    mask: Tensor, mode: Aggregation, *, longest: int = 1, count: int | None = None
) -> Tensor:
    """Returns the factor of each token's loss in the aggregate, (N, T); 0 where masked.

    Sequences without a valid token do not count. Without any valid token all factors are 0.

    longest: the most tokens that a response may have, for "seq-mean-token-sum-norm". count: the
    `scale_count` of a whole minibatch, if `mask` is a micro-batch of it. The aggregates of the
    micro-batches then sum to that of the minibatch, however its rows are split.
    """
    valid = mask.bool()
    divisors, own_count = AGGREGATIONS[mode](valid, longest)
    total = max(1, own_count if count is None else count)
    return valid / (divisors * total).clamp(min=1)


def scale_count(mask: Tensor, mode: Aggregation) -> int:
    """Returns the size of the mean: the valid tokens, or the sequences with a valid token."""
    return AGGREGATIONS[mode](mask.bool(), 1)[1]


def _sequences(valid: Tensor) -> int:
    """Returns the number of sequences with a valid token."""
    return int(valid.any(dim=1).sum())


def _ratio(logprobs: Tensor, prox_logprobs: Tensor, valid: Tensor) -> Tensor:
    # Masked before the exponential as well as after it: the gradient of 0 * NaN is NaN.
    log_ratio = torch.where(valid, logprobs - prox_logprobs, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio: Tensor, center: Tensor | None, low: float | None, high: float | None) -> Tensor:
    low = math.inf if low is None else low
    high = math.inf if high is None else high
    if center is None:
        return ratio.clamp(1.0 - low, 1.0 + high)
    return torch.minimum(torch.maximum(ratio, center - low), center + high)
