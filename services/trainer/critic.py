"""BA-PPO: a critic beside the policy, and advantages token by token (GAE).

The critic is the same model with a value in place of its output layer. It is sharded and saved as
the policy is, and trained on the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapo_core.advantages import gae
from bapo_core.config import RunConfig
from services.trainer.data import PADDING, Batch, Packed, pack
from services.trainer.optimizer import make_optimizer
from services.trainer.policy import Policy, device_of, states_before
from services.trainer.ranks import Ranks


class Critic(nn.Module):
    """The value of the state before each response token. 0 everywhere at first."""

    def __init__(self, policy: Policy) -> None:
        """Takes the policy's model over."""
        super().__init__()
        self.model = policy.model
        model: Any = policy.model
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if head.weight is not embeddings.weight:
            head.weight.requires_grad_(False)  # of no use to it
        self.value = nn.Linear(policy.width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return device_of(self)

    def forward(self, packed: Packed) -> Tensor:
        """(K,) for the K response tokens of `packed`."""
        values: Tensor = self.value(states_before(self.model, packed).float())
        return values[:, 0]


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What the critic learns from, (N, R)."""

    before: Tensor
    """Its values before the step's first update."""
    returns: Tensor


class CriticTrainer:
    """The critic, its optimizer, and its part of each update. Every rank makes the same calls."""

    def __init__(self, config: RunConfig, critic: Critic, ranks: Ranks) -> None:
        self.config, self.critic, self.ranks = config, critic, ranks
        self.optimizer = make_optimizer(critic, config.critic.learning_rate, config.optimizer)

    @torch.no_grad()
    def advantages(
        self, batch: Batch, parts: Sequence[Tensor | None]
    ) -> tuple[Tensor, ValueTargets, dict[str, float]]:
        """(advantages (N, R), what to learn, metrics). A response's reward comes with its last
        token; advantages are whitened over the valid tokens of all ranks, if asked."""
        values = torch.zeros_like(batch.behavior)
        for rows in parts:
            found = self._values(batch, rows)
            if rows is not None:
                values[rows] = found
        settings = self.config.advantage
        advantages, returns = gae(
            token_rewards(batch), values, batch.mask, gamma=settings.gamma, lam=settings.lam
        )
        errors = (returns - values)[batch.mask]
        metrics = {
            "critic/value": self._moments(values[batch.mask])[0],
            "critic/explained_variance": 1.0
            - self._moments(errors)[1] / max(self._moments(returns[batch.mask])[1], 1e-12),
        }
        if settings.whiten:
            mean, variance = self._moments(advantages[batch.mask])
            whitened = (advantages - mean) / (variance**0.5 + 1e-8)
            advantages = torch.where(batch.mask, whitened, 0.0)
        return advantages, ValueTargets(values, returns), metrics

    def backward(
        self, batch: Batch, rows: Tensor | None, targets: ValueTargets, scale: Tensor
    ) -> float:
        """Adds the gradient of some rows; their share of the value loss.

        The loss is the larger of (V - R)^2 / 2 as it is, and with V within `critic.clip` of what
        it was before the step. scale: (N, R), shares of the whole update.
        """
        values = self._values(batch, rows)
        if rows is None:
            (values.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
            return 0.0
        before, returns = targets.before[rows], targets.returns[rows]
        clip = self.config.critic.clip
        near = before + (values - before).clamp(-clip, clip)
        squares = torch.maximum((values - returns).square(), (near - returns).square())
        loss = (0.5 * squares * scale[rows]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _values(self, batch: Batch, rows: Tensor | None) -> Tensor:
        """(len(rows), R), 0 if masked; of padding where there are no rows."""
        if rows is None:
            return self.critic(PADDING.to(self.critic.device))  # type: ignore[no-any-return]
        found = self.critic(pack(batch, rows).to(self.critic.device)).cpu()
        mask = batch.mask[rows]
        return torch.zeros(mask.shape).masked_scatter(mask, found)

    def _moments(self, values: Tensor) -> tuple[float, float]:
        """(mean, variance) over all ranks."""
        wide = values.double()
        sums = self.ranks.summed(
            {
                "count": float(len(wide)),
                "sum": float(wide.sum()),
                "squares": float(wide.square().sum()),
            }
        )
        count = max(sums["count"], 1.0)
        mean = sums["sum"] / count
        return mean, max(sums["squares"] / count - mean**2, 0.0)


def token_rewards(batch: Batch) -> Tensor:
    """(N, R): the reward of each response at its last token, 0 elsewhere."""
    last = batch.mask & ~nn.functional.pad(batch.mask[:, 1:], (0, 1)).bool()
    return torch.where(last, batch.rewards.flatten()[:, None].float(), 0.0)
