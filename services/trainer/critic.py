"""The critic of BA-PPO, which gives each token its own advantage (GAE).

The critic is the policy's model with a scalar value in place of the output layer. It is sharded and
saved as the policy is, and trained on the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bapo_core.advantages import gae, token_rewards, whiten
from bapo_core.config import RunConfig
from bapo_core.config.estimators import GaeConfig
from services.trainer.attention_kernels import Needs
from services.trainer.data import Batch, Packed
from services.trainer.families import device_of
from services.trainer.hidden_states import target_hidden_states
from services.trainer.micro_batches import MicroBatch
from services.trainer.policy import Policy, make_optimizer
from services.trainer.ranks import Ranks
from services.trainer.targets import ValueTargets
from services.trainer.transfer import read


class Critic(nn.Module):
    """Estimates the value of the state before each response token; 0 everywhere at first."""

    def __init__(self, policy: Policy) -> None:
        """Takes over the model of `policy`, which must not be used any more."""
        super().__init__()
        self.model = policy.model
        self.attention_kinds: frozenset[Needs] = policy.attention_kinds
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


class CriticTrainer:
    """Holds the critic and its optimizer. Every rank makes the same calls in the same order."""

    def __init__(self, config: RunConfig, critic: Critic, ranks: Ranks) -> None:
        assert isinstance(config.advantage, GaeConfig)  # no other estimator has a critic
        self.settings, self.critic, self.ranks = config.advantage, critic, ranks
        rate = self.settings.critic.learning_rate
        self.optimizer = make_optimizer(critic, rate, config.optimizer)

    @torch.no_grad()
    def advantages(
        self, batch: Batch, micro_batches: Sequence[MicroBatch]
    ) -> tuple[Tensor, ValueTargets, dict[str, float]]:
        """Returns (advantages (N, R), targets of the value loss, metrics).

        The last token of a response gets its reward. With `advantage.whiten`, advantages are
        whitened over the valid tokens of all ranks.

        micro_batches: of all rows of the batch; padding passes through the critic too.
        """
        values = torch.zeros_like(batch.behavior_logprobs)
        scores = read([self.critic(micro_batch.packed) for micro_batch in micro_batches])
        for micro_batch, of_tokens in zip(micro_batches, scores, strict=True):
            if micro_batch.rows is not None:
                mask = batch.mask[micro_batch.rows]
                values[micro_batch.rows] = torch.zeros(mask.shape).masked_scatter(
                    mask, of_tokens.float()
                )
        advantages, returns = gae(
            token_rewards(batch.row_rewards, batch.mask),
            values,
            batch.mask,
            gamma=self.settings.gamma,
            lam=self.settings.lam,
        )
        errors = (returns - values)[batch.mask]
        metrics = {
            "critic/value": self.ranks.moments(values[batch.mask])[0],
            "critic/explained_variance": 1.0
            - self.ranks.moments(errors)[1]
            / max(self.ranks.moments(returns[batch.mask])[1], 1e-12),
        }
        if self.settings.whiten:
            advantages = whiten(advantages, batch.mask, self.ranks.moments)
        return advantages, ValueTargets(values, returns), metrics

    def backward(
        self, micro_batch: MicroBatch, targets: ValueTargets, scale: Tensor, factor: float
    ) -> Tensor:
        """Adds the gradient of a micro-batch, and returns its share of the value loss.

        The loss is PPO's: the larger of (V - R)^2 / 2 and the same with V clipped to within
        `advantage.critic.clip` of its value before the step. targets, scale: of the micro-batch's
        rows, (n, R); the scales are shares of the whole update. factor: factor of the gradient, by
        `loss.minibatch_norm`.
        """
        scores = self.critic(micro_batch.packed)
        if micro_batch.rows is None:
            loss: Tensor = scores.sum() * 0.0
        else:
            values = micro_batch.grid.spread(scores)
            old_values, returns = targets
            clip = self.settings.critic.clip
            clipped = old_values + (values - old_values).clamp(-clip, clip)
            squares = torch.maximum((values - returns).square(), (clipped - returns).square())
            loss = (0.5 * squares * scale).sum()
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach()
