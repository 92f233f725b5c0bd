"""The estimators of advantages that `advantage.estimator` selects, of which GAE needs a critic.

An estimator is a function of the batch's responses, the settings, and a function that returns the
moments of a quantity over all ranks. In the equations, r is the reward of a response and G is the
size of its group. A mean is taken over the group, unless an equation names another set.

Other distributions add estimators by the entry-point group `bapo.estimators`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bapo_core.config.estimators import (
    ESTIMATOR_ENTRY_POINTS,
    GroupAdvantageConfig,
    MaxrlConfig,
    ReinforcePpConfig,
)
from bapo_core.errors import ConfigError
from bapo_core.plug_ins import find

_WHITENING_EPS = 1e-8
"""Constant that is added to a variance before its root is taken, as in verl and TRL."""


@dataclass(frozen=True, slots=True)
class Responses:
    """The responses that advantages are estimated for: M responses in N groups of at most G."""

    rewards: Tensor
    """(N, G), padded with 0 on the right for smaller groups."""
    mask: Tensor
    """(M, R) true at the valid tokens, a row for each response, group by group."""
    penalties: Tensor
    """(M, R) subtracted from the reward of each token; 0 unless `kl.placement` is reward."""
    sizes: Tensor | None = None
    """(N,) responses of each group; None if all have G."""

    @property
    def present(self) -> Tensor:
        """(N, G) true at responses, false at padding."""
        return _present(self.rewards, self.sizes)

    @property
    def lengths(self) -> Tensor:
        """(N, G) valid tokens of each response; 0 at padding."""
        lengths = self.mask.sum(dim=1)
        return lengths.new_zeros(self.rewards.shape).masked_scatter(self.present, lengths)

    def by_row(self, values: Tensor) -> Tensor:
        """Returns values (N, G) as (M, 1), a row for each response."""
        return values[self.present][:, None]


Moments = Callable[[Tensor], tuple[float, float, float]]
"""Function of the values of this rank, (n,), that returns the mean, the population variance and the
number of those of all ranks."""
Estimator = Callable[[Responses, Any, Moments], Tensor]
"""Function of the responses, the section `advantage` and the moments that returns the advantages,
(M, 1) of responses or (M, R) of tokens."""


def group(responses: Responses, settings: GroupAdvantageConfig, moments: Moments) -> Tensor:
    """Compares the responses of a group (GRPO, arXiv 2402.03300; BAPO, arXiv 2602.20722, Eq. 2).

        A = (r - mean) / sqrt(var + eps)       std: population, scale: group
        A = (r - mean) / (s + eps)             std: sample, s with one degree of freedom less

    Under `scale: batch`, the deviation is that of all rewards of the batch (LitePPO, arXiv
    2508.08221), and under `scale: none` there is no division (Dr. GRPO, arXiv 2503.20783). The
    default is Eq. 2 with eps 1e-6. A group of equal rewards gets exactly 0.
    """
    rewards, sizes = responses.rewards, responses.sizes
    if settings.scale == "group":
        advantages = group_relative(rewards, sizes, std=settings.std, eps=settings.eps)
    else:
        advantages = _centre(rewards, sizes)
    if settings.scale == "batch":
        _, variance, count = moments(responses.by_row(rewards)[:, 0])
        if settings.std == "population":
            advantages = advantages / (variance + settings.eps) ** 0.5
        else:
            deviation = (variance * count / max(count - 1, 1)) ** 0.5
            advantages = advantages / (deviation + settings.eps)
    return responses.by_row(advantages)


def rloo(
    responses: Responses,
    settings: Any,
    moments: Moments,
) -> Tensor:
    """Takes the mean of the other responses as the baseline (RLOO, arXiv 2402.14740).

        A = r - mean of the other G - 1 rewards = G / (G - 1) (r - mean)

    The baseline does not depend on the response, so that the estimate is unbiased.
    """
    sizes = responses.present.sum(dim=1, keepdim=True).to(responses.rewards.dtype)
    # A response without others has no baseline but itself, and advantage 0.
    factors = sizes / (sizes - 1).clamp(min=1)
    return responses.by_row(_centre(responses.rewards, responses.sizes) * factors)


def opo(
    responses: Responses,
    settings: Any,
    moments: Moments,
) -> Tensor:
    """Takes the baseline of least variance, weighted by length (OPO, arXiv 2505.23585).

        A = r - sum(length r) / sum(length)

    The baseline is optimal for exactly on-policy updates, if the squared norm of a response's
    gradient grows with its length. A group of equal rewards gets exactly 0.
    """
    rewards, lengths = responses.rewards, responses.lengths
    total = lengths.sum(dim=1, keepdim=True).clamp(min=1)
    baseline = (rewards * lengths).sum(dim=1, keepdim=True) / total
    constant = _constant(rewards, responses.present)
    return responses.by_row(torch.where(constant, 0.0, rewards - baseline))


def maxrl(
    responses: Responses,
    settings: MaxrlConfig,
    moments: Moments,
) -> Tensor:
    """Divides by the mean reward, which weighs hard prompts most (MaxRL, arXiv 2602.02710).

        A = (r - mean) / (mean + eps)

    For rewards of 0 and 1, its gradient approximates that of the log-probability of a correct
    response. eps is 1e-6.
    """
    rewards, sizes = responses.rewards, responses.sizes
    return responses.by_row(_centre(rewards, sizes) / (_means(rewards, sizes) + settings.eps))


def reinforce_pp(responses: Responses, settings: ReinforcePpConfig, moments: Moments) -> Tensor:
    """Whitens the returns of tokens over the whole batch (REINFORCE++, arXiv 2501.03262).

        R_t = sum over k >= t of gamma^(k - t) (r at the last token - penalty_k)
        A_t = (R_t - mean of R) / sqrt(variance of R + 1e-8)

    The mean and the sample variance are over all valid tokens of the batch. The penalty is that of
    the KL to the reference under `kl.placement: reward` (paper), else 0. gamma is 1 by default.
    Groups have no influence, so that a group whose responses are all right or all wrong has
    advantages, too.
    """
    mask = responses.mask
    rewards = token_rewards(responses.by_row(responses.rewards)[:, 0], mask) - responses.penalties
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        value = rewards[:, t] + settings.gamma * following
        following = torch.where(mask[:, t], value, following)
        returns[:, t] = following
    return whiten(returns, mask, moments)


def reinforce_pp_baseline(
    responses: Responses,
    settings: Any,
    moments: Moments,
) -> Tensor:
    """Whitens r - mean over the tokens of the batch (REINFORCE++ w/ baseline, arXiv 2501.03262).

        A = (r - mean - mean over the batch) / sqrt(variance over the batch + 1e-8)

    The statistics of the batch are over all valid tokens, with the sample variance.
    """
    centred = responses.by_row(_centre(responses.rewards, responses.sizes))
    return whiten(centred.expand(responses.mask.shape), responses.mask, moments)


def whiten(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """Scales the valid values of all ranks to mean 0 and sample variance 1; 0 where masked."""
    mean, variance, count = moments(values[mask])
    deviation = (variance * count / max(count - 1, 1) + _WHITENING_EPS) ** 0.5
    return torch.where(mask, (values - mean) / deviation, 0.0)


def token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns rewards (M,) by token, like `mask` (M, R): each at its response's last token."""
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1)).bool()
    return torch.where(last, rewards[:, None], 0.0)


def group_relative(
    rewards: Tensor,
    sizes: Tensor | None = None,
    *,
    std: Literal["population", "sample"] = "population",
    eps: float = 1e-6,
) -> Tensor:
    """Returns the advantages (N, G) for the rewards (N, G) of N groups of G responses.

    `population`: (r - mean) / sqrt(var + eps) (Eq. 2). `sample`: (r - mean) / (s + eps), s with
    G - 1 degrees of freedom (authors' code). A group whose rewards are all equal gets exactly 0.

    sizes: (N,) responses of each group; None is G. Rewards after them are padding, and get 0.

    Raises `ValueError` unless rewards are (N, G) with G >= 2.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; group statistics need (N, G) with G >= 2"
        )
    if std == "population":
        scale = (group_variance(rewards, sizes)[:, None] + eps).sqrt()
    else:
        scale = group_variance(rewards, sizes, correction=1)[:, None].sqrt() + eps
    return _centre(rewards, sizes) / scale


def group_variance(rewards: Tensor, sizes: Tensor | None = None, *, correction: int = 0) -> Tensor:
    """Returns the variance (N,) of the rewards (N, G) of each group, 0 for a single response.

    sizes: as in `group_relative`. correction: 1 for the sample variance.
    """
    squares = _centre(rewards, sizes).square().sum(dim=1)
    return squares / (_present(rewards, sizes).sum(dim=1) - correction).clamp(min=1)


def _centre(rewards: Tensor, sizes: Tensor | None) -> Tensor:
    """Returns rewards (N, G) minus the mean of their group, exactly 0 in a group of equal rewards.

    The mean of equal floats may differ from them by one ulp, which division by eps magnifies.
    """
    present = _present(rewards, sizes)
    centred = torch.where(present, rewards - _means(rewards, sizes), 0.0)
    return torch.where(_constant(rewards, present), 0.0, centred)


def _means(rewards: Tensor, sizes: Tensor | None) -> Tensor:
    """Returns the mean reward of each group, (N, 1)."""
    return rewards.sum(dim=1, keepdim=True) / _present(rewards, sizes).sum(dim=1, keepdim=True)


def _constant(rewards: Tensor, present: Tensor) -> Tensor:
    """Returns for each group whether its rewards are all equal, (N, 1)."""
    return ((rewards == rewards[:, :1]) | ~present).all(dim=1, keepdim=True)


def _present(rewards: Tensor, sizes: Tensor | None) -> Tensor:
    """Returns a mask (N, G) of the rewards that are no padding."""
    if sizes is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    return torch.arange(rewards.shape[1]) < sizes[:, None]


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns) of GAE (arXiv 1506.02438), for token rewards and values (N, T).

        delta = r + gamma V' - V
        A     = delta + gamma lam A'

    V' and A' are those of the next token, 0 after the last, and returns are A + V. Nothing is
    whitened. Positions where `mask` (N, T) is false are skipped and get 0; their rewards and values
    may be NaN.
    """
    valid = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(valid[:, t], advantage, 0.0)
    return advantages, torch.where(valid, advantages + values, 0.0)


ESTIMATORS: dict[str, Estimator] = {
    "group": group,
    "rloo": rloo,
    "opo": opo,
    "maxrl": maxrl,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
"""The built-in estimators that need no critic, by name."""


def get_estimator(name: str) -> Estimator:
    """Returns an estimator by name, which may be a plug-in's.

    Raises `ConfigError` as `find` does.
    """
    return find(name, ESTIMATORS, group=ESTIMATOR_ENTRY_POINTS, kind="estimator", error=ConfigError)
