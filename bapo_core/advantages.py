"""Estimators of advantages: relative to the group (GRPO, Eq. 2), and GAE with a critic (PPO)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def group_relative(
    rewards: Tensor, *, std: Literal["population", "sample"] = "population", eps: float = 1e-6
) -> Tensor:
    """Returns the advantages (N, G) for the rewards (N, G) of N groups of G responses.

    `population`: (r - mean) / sqrt(var + eps) (Eq. 2). `sample`: (r - mean) / (s + eps), s with
    G - 1 degrees of freedom (authors' code). A group whose rewards are all equal gets exactly 0.

    Raises `ValueError` unless rewards are (N, G) with G >= 2.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; group statistics need (N, G) with G >= 2"
        )
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if std == "population":
        scale = (rewards.var(dim=1, correction=0, keepdim=True) + eps).sqrt()
    else:
        scale = rewards.std(dim=1, correction=1, keepdim=True) + eps
    # The mean of equal floats may differ from them by one ulp, which division by eps magnifies.
    constant = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(constant, 0.0, centred / scale)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns), both (N, T), for token rewards and values (N, T).

    delta = r + gamma V' - V and A = delta + gamma lam A', where V' = 0 after the last token, and
    returns are A + V. Nothing is whitened. Positions where `mask` (N, T) is false are skipped and
    get 0; their rewards and values may be NaN.
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
