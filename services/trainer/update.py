"""Makes one training step on one batch: proximal log-probs, minibatches, clip, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bapo_core.advantages import Responses, get_estimator
from bapo_core.config import RunConfig
from bapo_core.errors import BapoError, TransientError
from bapo_core.importance import truncated_weights
from bapo_core.kl import kl_penalty
from bapo_core.losses import Aggregation, clip_fraction, scale_count, token_scale
from bapo_core.objectives import get_objective, losses_by_source
from bapo_core.types import Source
from services.trainer.checkpoint import Saved, Trained
from services.trainer.critic import Critic, CriticTrainer, ValueTargets
from services.trainer.data import PADDING, Batch, Plan, microbatches
from services.trainer.diagnostics import StepResults, diagnose
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy, make_optimizer, response_logprobs
from services.trainer.ranks import Ranks
from services.trainer.statistics import (
    NO_STATISTICS,
    UpdateStatistics,
    draw_tokens,
    gather_tokens,
    select_tokens,
)
from services.trainer.targets import Targets, TokenResults


class NonFiniteLoss(TransientError):
    """The loss or the gradient is not finite; the weights were left as they were."""

    def __init__(self, message: str, evidence: dict[str, Any] | None = None) -> None:
        """evidence: what this rank trained on."""
        super().__init__(message)
        self.evidence = evidence or {}


class Updater:
    """Holds policy and optimizer, the critic if any, and the initial policy if the KL needs it.

    All ranks call the same methods in the same order, each with its own part of the batch. A rank
    with fewer micro-batches passes padding through the model meanwhile: the others need its shards.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        ranks: Ranks,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.config, self.policy, self.reference = config, policy, reference
        self.critic = None if critic is None else CriticTrainer(config, critic, ranks)
        self.ranks = ranks
        self.objective = get_objective(config.loss.objective)
        self.optimizer = make_optimizer(policy, config.optimizer.learning_rate, config.optimizer)

    @property
    def trained(self) -> Trained:
        """Every module that is trained and saved, with its optimizer, by name."""
        trained: Trained = {"model": (self.policy, self.optimizer)}
        if self.critic is not None:
            trained["critic"] = (self.critic.critic, self.critic.optimizer)
        return trained

    def saved(self, step: int) -> Saved:
        """Returns the modules that the checkpoint after `step` stores."""
        if self.reference is None or not self.config.kl.resets_before(step):
            return self.trained
        return {**self.trained, "reference": (self.reference, None)}

    @torch.no_grad()
    def reset_reference(self) -> None:
        """Makes the policy as it is now the reference of the KL. Both have the same shards."""
        assert self.reference is not None
        pairs = zip(self.reference.parameters(), self.policy.parameters(), strict=True)
        for reference, trained in pairs:
            reference.copy_(trained)

    def step(
        self, step: int, batch: Batch, plan: Plan, window: tuple[float, float], timer: PhaseTimer
    ) -> dict[str, float]:
        """Trains on the groups that `plan` gives to this rank, which are those of `batch`.

        Returns the step's metrics on rank 0, and nothing on the other ranks.

        window: [c2, c3] of the step, for the constants of Theorem 3.2.

        Raises `NonFiniteLoss` before an update that would spoil the weights.
        """
        self._set_learning_rate(step)
        with timer.phase("proximal"):
            targets, metrics = self._make_targets(batch, step)
        results = TokenResults.empty(batch)
        positions = plan.of_rank(self.ranks.rank)
        with timer.phase("update"):
            for index, update in enumerate(plan.updates):
                rows = batch.rows_of([positions.index(p) for p in update[self.ranks.rank]])
                statistics = self._statistics(batch, rows, targets, positions, (step, index))
                totals = self._update(
                    batch, rows, sum(map(len, update)), targets, results, statistics
                )
                for name, value in totals.items():
                    metrics[name] = metrics.get(name, 0.0) + value / len(plan.updates)
        metrics["updates"] = float(len(plan.updates))
        by_rank = self.ranks.gather_to_main(
            StepResults.of_batch(batch, positions, targets, results)
        )
        if not by_rank:
            return {}
        return metrics | diagnose(self.config, StepResults.concatenate(by_rank), window)

    def supervise(self, step: int, batch: Batch) -> dict[str, float]:
        """Takes one optimizer step on the mean of -log pi over the tokens of all ranks' batches.

        Returns the loss and the norm of its gradient, on every rank. Raises `NonFiniteLoss` before
        a step that would spoil the weights.
        """
        self._set_learning_rate(step)  # the step may have had no other update
        rows = torch.arange(len(batch.lengths))
        scale = self._loss_scale(batch.mask, rows, "token-mean")
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro_batch in self._micro_batches(batch, rows):
            logprobs, _ = self._forward(batch, micro_batch, self.policy)
            weights = torch.zeros(()) if micro_batch is None else scale[micro_batch]
            loss = -(logprobs * weights).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        totals = self.ranks.all_reduce_sum({"supervised/loss": total})
        totals["supervised/gradient_norm"] = self._clip_gradient(self.policy)
        self._check_finite(totals, {"rows": rows, "batch": batch})
        self.optimizer.step()
        return totals

    # -- targets of the loss

    @torch.no_grad()
    def score(
        self, batch: Batch, policy: Policy | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Returns log-probs (N, R) of this rank's batch under `policy`, or the trained one now.

        rows: those to score; None is all. The others get 0.
        """
        scores = torch.zeros_like(batch.behavior_logprobs)
        if rows is None:
            rows = torch.arange(len(batch.lengths))
        for micro_batch in self._micro_batches(batch, rows):
            logprobs, _ = self._forward(batch, micro_batch, policy or self.policy)
            if micro_batch is not None:
                scores[micro_batch] = logprobs
        return scores

    def _forward(
        self, batch: Batch, rows: Tensor | None, policy: Policy, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns (log-probs, entropies), (len(rows), R) each; of padding if `rows` is None."""
        temperature = self.config.rollout.temperature
        if rows is None:
            return policy(PADDING.to(policy.device), temperature, entropy)  # type: ignore[no-any-return]
        return response_logprobs(policy, batch, rows, temperature, entropy=entropy)

    def _micro_batches(self, batch: Batch, rows: Tensor) -> list[Tensor | None]:
        """Splits rows into micro-batches, padded with None so that all ranks have equally many."""
        budget = self.config.optimizer.microbatch_tokens
        micro_batches = microbatches(batch, rows, budget, padded=not self.policy.packs)
        count = self.ranks.all_reduce_max(len(micro_batches))
        return [*micro_batches, *[None] * (count - len(micro_batches))]

    def _make_targets(self, batch: Batch, step: int = 1) -> tuple[Targets, dict[str, float]]:
        """Returns the constants of the step's loss, and the critic's metrics if there is one."""
        loss, kl = self.config.loss, self.config.kl
        behavior = batch.behavior_logprobs
        current = self.score(batch)
        proximal = self._proximal_logprobs(batch, current)
        # A demonstration has no behaviour policy to stay close to.
        reference = torch.where(batch.demonstrated, current, behavior)
        if kl.coefficient > 0 and kl.reference == "initial":
            reference = self.score(batch, self.reference)
        advantages, values, metrics = self._advantages(batch, current - reference)
        mask = batch.mask
        if loss.mask_truncated:
            mask = mask & ~batch.truncated[:, None]
        targets = Targets(
            mask=mask,
            advantages=advantages,
            proximal_logprobs=proximal,
            weights=self._importance_weights(batch, proximal, mask),
            reference_logprobs=reference,
            center=(current - behavior).exp() if loss.clip_center == "current" else None,
            current_logprobs=current,
            values=values,
            reference_share=kl.reference_share(step),
        )
        return targets, metrics

    def _importance_weights(self, batch: Batch, proximal_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Returns importance weights (N, R), proximal over behaviour; 1 under `ratio: behavior`.

        mask: (N, R) tokens that have a loss, whose mean `loss.weight_norm` divides by.
        """
        loss = self.config.loss
        if loss.ratio == "behavior":
            return batch.mask.float()
        weights = truncated_weights(
            proximal_logprobs, batch.behavior_logprobs, batch.mask, **loss.weighting
        )
        if loss.weight_norm == "batch":
            mean, _, _ = self.ranks.moments(weights[mask])
            weights = weights / (mean or 1.0)
        return weights

    def _advantages(
        self, batch: Batch, log_ratios: Tensor
    ) -> tuple[Tensor, ValueTargets | None, dict[str, float]]:
        """Returns (advantages (N, R), the critic's targets, the critic's metrics).

        log_ratios: (N, R) of the policy to the reference of the KL penalty, for the reward.
        """
        if self.critic is not None:
            all_rows = torch.arange(len(batch.lengths))
            return self.critic.advantages(batch, self._micro_batches(batch, all_rows))
        kl, settings = self.config.kl, self.config.advantage
        coefficient = kl.coefficient if kl.placement == "reward" else 0.0
        penalties = coefficient * log_ratios
        responses = Responses(batch.rewards, batch.mask, penalties, batch.sizes)
        advantages = get_estimator(settings.estimator)(responses, settings, self.ranks.moments)
        return advantages.expand_as(batch.behavior_logprobs), None, {}

    def _proximal_logprobs(self, batch: Batch, current_logprobs: Tensor) -> Tensor:
        """Returns log-probs (N, R) in the denominator of the PPO ratio, by `loss.ratio`."""
        match self.config.loss.ratio:
            case "prox_current":
                return current_logprobs
            case "behavior":
                return batch.behavior_logprobs
            case "decoupled":
                is_replayed = [source == Source.REPLAYED for source in batch.sources]
                replayed = torch.tensor(is_replayed, dtype=torch.bool)[:, None]
                storage = batch.storage_logprobs
                if storage is None:
                    storage = torch.full_like(current_logprobs, torch.nan)
                if bool((storage.isnan() & replayed & batch.mask).any()):
                    raise BapoError(
                        "loss.ratio=decoupled needs the log-probs of the storage step for every "
                        "replayed group, and some have none: the run was started with another "
                        "ratio; start a new run"
                    )
                return torch.where(replayed, storage, current_logprobs)

    # -- one optimizer update

    def _statistics(
        self,
        batch: Batch,
        rows: Tensor,
        targets: Targets,
        positions: Sequence[int],
        update: tuple[int, int],
    ) -> UpdateStatistics:
        """Returns what the objective needs of the whole update, of which this rank has `rows`.

        positions: places of the batch's groups in the manifest. update: the step, and the index of
        the update.
        """
        statistics = NO_STATISTICS
        if self.objective.draws:
            draws = draw_tokens(batch, positions, self.config.seed, *update)
            statistics = replace(statistics, draws=draws)
        if self.objective.statistics is None:
            return statistics
        # Before the step's first update, the policy is theta_t, whose log-probs are known.
        first = update[1] == 0
        scored = targets.current_logprobs if first else self.score(batch, rows=rows)
        statistics = replace(statistics, scored_logprobs=scored)
        tokens = select_tokens(rows, targets, statistics, scored[rows])
        settings = self.config.loss.objective_settings
        values = self.objective.statistics(gather_tokens(tokens, self.ranks), settings)
        return replace(statistics, values=values)

    def _update(
        self,
        batch: Batch,
        rows: Tensor,
        group_count: int,
        targets: Targets,
        results: TokenResults,
        statistics: UpdateStatistics = NO_STATISTICS,
    ) -> dict[str, float]:
        """Accumulates gradients over micro-batches of `rows`, then takes one optimizer step.

        group_count: groups of the update, on all ranks. results: gets the results of `rows`.
        """
        scale = self._loss_scale(targets.mask, rows, self.config.loss.aggregation)
        metric_scale = self._metric_scale(targets.mask, rows, scale)
        # It is no part of the scale, so that metrics are means whatever the size of the update.
        factor = 1.0
        if self.config.loss.norm == "nominal":
            factor = group_count / self.config.optimizer.minibatch_prompts
        for _, optimizer in self.trained.values():
            optimizer.zero_grad(set_to_none=True)
        totals = dict.fromkeys(("loss", "kl", "entropy", "clip_fraction"), 0.0)
        micro_batches = self._micro_batches(batch, rows)
        if self.critic is not None and targets.values is not None:
            totals["critic/loss"] = sum(
                self.critic.backward(batch, micro_batch, targets.values, metric_scale, factor)
                for micro_batch in micro_batches
            )
        for micro_batch in micro_batches:
            if micro_batch is None:
                logprobs, _ = self._forward(batch, None, self.policy, entropy=True)
                (logprobs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            scales = scale[micro_batch], metric_scale[micro_batch]
            loss, metrics = self._loss(batch, micro_batch, targets, scales, results, statistics)
            (loss * factor).backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                totals[name] += value
        totals = self.ranks.all_reduce_sum(totals) | statistics.values
        for name, (module, _) in self.trained.items():
            prefix = "" if name == "model" else f"{name}/"
            totals[f"{prefix}gradient_norm"] = self._clip_gradient(module)
        self._check_finite(totals, {"rows": rows, "batch": batch, "targets": targets})
        for _, optimizer in self.trained.values():
            optimizer.step()
        return totals

    def _loss_scale(self, mask: Tensor, rows: Tensor, aggregation: Aggregation) -> Tensor:
        """Returns factors (N, R) of the losses of this rank's tokens in `rows`; 0 elsewhere.

        They are shares of the whole update, so that the sum over all ranks is its aggregate loss.
        """
        local_count = {"count": float(scale_count(mask[rows], aggregation))}
        count = int(self.ranks.all_reduce_sum(local_count)["count"])
        longest = self.config.rollout.max_response_tokens
        scale = torch.zeros(mask.shape)
        scale[rows] = token_scale(mask[rows], aggregation, longest=longest, count=count)
        return scale

    def _metric_scale(self, mask: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
        """Returns factors (N, R) that sum to 1 over all ranks: the loss's, if it is a mean."""
        if self.config.loss.aggregation in ("token-mean", "seq-mean-token-mean"):
            return scale
        return self._loss_scale(mask, rows, "token-mean")

    def _clip_gradient(self, module: nn.Module) -> float:
        """Clips the gradient in place; returns its global norm before clipping."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), self.config.optimizer.gradient_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _loss(
        self,
        batch: Batch,
        rows: Tensor,
        targets: Targets,
        scales: tuple[Tensor, Tensor],
        results: TokenResults,
        statistics: UpdateStatistics,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the share of `rows` in the update's loss and in its metrics, by their scales."""
        settings, kl = self.config.loss, self.config.kl
        scale, metric_scale = scales
        entropy_bonus = settings.entropy_coefficient
        kl_coefficient = kl.coefficient if kl.placement == "loss" else 0.0
        logprobs, entropy = self._forward(batch, rows, self.policy, entropy=True)
        results.logprobs[rows] = logprobs.detach()
        mask = targets.mask[rows]
        tokens = select_tokens(rows, targets, statistics, logprobs)
        if settings.by_source:
            sources = batch.sources
            of_rows = [sources[row] for row in rows.tolist()]
            policy_losses, clipped = losses_by_source(
                self.objective, tokens, of_rows, settings, statistics.values
            )
        else:
            policy_losses, clipped = self.objective.loss(
                tokens, settings.objective_settings, statistics.values
            )
        results.clipped[rows] = clipped

        def penalty_to(reference: Tensor) -> Tensor:
            behavior = batch.behavior_logprobs[rows]
            return kl_penalty(logprobs, reference[rows], behavior, mask, estimator=kl.estimator)

        penalty = penalty_to(targets.reference_logprobs)
        if targets.reference_share < 1.0:
            penalty = torch.lerp(
                penalty_to(targets.current_logprobs), penalty, targets.reference_share
            )
        losses = policy_losses + kl_coefficient * penalty
        if entropy_bonus:
            losses = losses - entropy_bonus * entropy
        loss = (losses * scale).sum()
        share = float((mask * metric_scale).sum())
        return loss, {
            "loss": float(loss.detach()),
            "kl": float((penalty.detach() * metric_scale).sum()),
            "entropy": float((entropy.detach() * metric_scale).sum()),
            "clip_fraction": share * clip_fraction(clipped, mask),
        }

    def _set_learning_rate(self, step: int) -> None:
        settings = self.config.optimizer
        warm = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
        rates = {"model": settings.learning_rate, "critic": self.config.critic.learning_rate}
        for name, (_, optimizer) in self.trained.items():
            for group in optimizer.param_groups:
                group["lr"] = rates[name] * warm

    @staticmethod
    def _check_finite(totals: dict[str, float], evidence: dict[str, Any]) -> None:
        wrong = [name for name, value in totals.items() if not torch.isfinite(torch.tensor(value))]
        if wrong:
            raise NonFiniteLoss(
                f"{' and '.join(wrong)} not finite: stopped before the optimizer step; start a new "
                "run with a lower optimizer.learning_rate (resuming repeats the step with the "
                "stored one)",
                {"totals": totals, **evidence},
            )
