"""The critic of BA-PPO, which gives each token its own advantage (GAE).

The critic is the policy's model with a scalar value in place of the output layer. It is sharded and
saved as the policy is, and trained on the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapo_core.advantages import gae, token_rewards, whiten
from bapo_core.config import RunConfig
from services.trainer.data import PADDING, Batch, Packed, pack
from services.trainer.policy import Policy, device_of, make_optimizer, target_hidden_states
from services.trainer.ranks import Ranks


class Critic(nn.Module):
    """Estimates the value of the state before each response token; 0 everywhere at first."""

    def __init__(self, policy: Policy) -> None:
        """Takes over the model of `policy`, which must not be used any more."""
        super().__init__()
        self.model = policy.model
        model: Any = policy.model
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if head.weight is not embeddings.weight:
            head.weight.requires_grad_(False)  # the critic has no logits
        self.value = nn.Linear(policy.width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return device_of(self)

    def forward(self, packed: Packed) -> Tensor:
        """Returns the values (K,) at the K response tokens of `packed`."""
        values: Tensor = self.value(target_hidden_states(self.model, packed).float())
        return values[:, 0]


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """Constants of the value loss, (N, R) each."""

    old_values: Tensor
    """The critic's values before the step's first update."""
    returns: Tensor


class CriticTrainer:
    """Holds the critic and its optimizer. Every rank makes the same calls in the same order."""

    def __init__(self, config: RunConfig, critic: Critic, ranks: Ranks) -> None:
        self.config, self.critic, self.ranks = config, critic, ranks
        self.optimizer = make_optimizer(critic, config.critic.learning_rate, config.optimizer)

    @torch.no_grad()
    def advantages(
        self, batch: Batch, micro_batches: Sequence[Tensor | None]
    ) -> tuple[Tensor, ValueTargets, dict[str, float]]:
        """Returns (advantages (N, R), targets of the value loss, metrics).

        The last token of a response gets its reward. With `advantage.whiten`, advantages are
        whitened over the valid tokens of all ranks.

        micro_batches: of all rows of the batch; None passes padding through the critic.
        """
        values = torch.zeros_like(batch.behavior_logprobs)
        for rows in micro_batches:
            row_values = self._values(batch, rows)
            if rows is not None:
                values[rows] = row_values
        settings = self.config.advantage
        advantages, returns = gae(
            token_rewards(batch.row_rewards, batch.mask),
            values,
            batch.mask,
            gamma=settings.gamma,
            lam=settings.lam,
        )
        errors = (returns - values)[batch.mask]
        metrics = {
            "critic/value": self.ranks.moments(values[batch.mask])[0],
            "critic/explained_variance": 1.0
            - self.ranks.moments(errors)[1]
            / max(self.ranks.moments(returns[batch.mask])[1], 1e-12),
        }
        if settings.whiten:
            advantages = whiten(advantages, batch.mask, self.ranks.moments)
        return advantages, ValueTargets(values, returns), metrics

    def backward(
        self,
        batch: Batch,
        rows: Tensor | None,
        targets: ValueTargets,
        scale: Tensor,
        factor: float,
    ) -> float:
        """Adds the gradient of `rows`, and returns their share of the value loss.

        The loss is PPO's: the larger of (V - R)^2 / 2 and the same with V clipped to within
        `critic.clip` of its value before the step. scale: (N, R) shares of the whole update.
        factor: factor of the gradient, by `loss.norm`.
        """
        values = self._values(batch, rows)
        if rows is None:
            (values.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
            return 0.0
        old_values, returns = targets.old_values[rows], targets.returns[rows]
        clip = self.config.critic.clip
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        squares = torch.maximum((values - returns).square(), (clipped - returns).square())
        loss = (0.5 * squares * scale[rows]).sum()
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _values(self, batch: Batch, rows: Tensor | None) -> Tensor:
        """Returns values (len(rows), R), 0 if masked; those of padding if `rows` is None."""
        if rows is None:
            return self.critic(PADDING.to(self.critic.device))  # type: ignore[no-any-return]
        values = self.critic(pack(batch, rows).to(self.critic.device)).cpu()
        mask = batch.mask[rows]
        return torch.zeros(mask.shape).masked_scatter(mask, values)
