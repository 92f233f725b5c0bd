"""Makes one training step on one batch: proximal log-probs, minibatches, clip, optimizer.

Nothing is computed twice: the responses of the step's first update are scored under theta_t by
their own forward pass, and only the others by a pass of their own, where the loss needs it. During
an update the host waits for a GPU once, to read the update's results before the optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from bapo_core.advantages import Estimator, Responses, get_estimator
from bapo_core.config import RunConfig
from bapo_core.errors import BapoError, TransientError
from bapo_core.kl import kl_penalty
from bapo_core.losses import Aggregation, scale_count, token_scale
from bapo_core.objectives import get_objective, losses_by_source
from services.trainer.checkpoint import SUPERVISED_OPTIMIZER, ModuleStates
from services.trainer.critic import Critic, CriticTrainer
from services.trainer.data import Batch, Plan, microbatches
from services.trainer.diagnostics import StepResults, diagnose
from services.trainer.memory import MemoryPlan, plan_memory
from services.trainer.micro_batches import MicroBatch, row_order, row_slices
from services.trainer.phases import PhaseTimer
from services.trainer.policy import Policy, make_optimizer
from services.trainer.ranks import Ranks
from services.trainer.targets import Targets, TokenResults, ValueTargets
from services.trainer.transfer import read, send
from services.trainer.update_statistics import (
    NO_STATISTICS,
    UpdateStatistics,
    draw_tokens,
    gather_tokens,
    tokens_of,
)


class NonFiniteLoss(TransientError):
    """The loss or the gradient is not finite; the weights were left as they were."""

    def __init__(self, message: str, evidence: dict[str, Any] | None = None) -> None:
        """evidence: what this rank trained on."""
        super().__init__(message)
        self.evidence = evidence or {}


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """Constants of an update for its rows, (n, R), on the device, in the order of the passes."""

    targets: Targets
    scale: Tensor
    """Factors of the losses, shares of the whole update."""
    metric_scale: Tensor
    """Factors of the metrics, which sum to 1 over all ranks."""
    pre_update_logprobs: Tensor | None
    uniforms: Tensor | None
    sources: dict[str, Tensor]
    """For each source, a mask (n, 1) of its rows; empty without `loss.by_source`."""

    def select(self, rows: Tensor | slice) -> UpdateInputs:
        """Returns the inputs of some rows."""
        return UpdateInputs(
            self.targets.select(rows),
            self.scale[rows],
            self.metric_scale[rows],
            None if self.pre_update_logprobs is None else self.pre_update_logprobs[rows],
            None if self.uniforms is None else self.uniforms[rows],
            {source: mask[rows] for source, mask in self.sources.items()},
        )

    def to(self, device: torch.device) -> UpdateInputs:
        """Returns a copy on `device`, with one transfer."""
        of_targets = self.targets.tensors()
        optional = {"pre_update_logprobs": self.pre_update_logprobs, "uniforms": self.uniforms}
        own = {"scale": self.scale, "metric_scale": self.metric_scale}
        own |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        sent = iter(send([*of_targets.values(), *own.values(), *self.sources.values()], device))
        moved_targets: dict[str, Any] = {name: next(sent) for name in of_targets}
        moved: dict[str, Any] = {name: next(sent) for name in own}
        moved["sources"] = {source: next(sent) for source in self.sources}
        return replace(self, targets=replace(self.targets, **moved_targets), **moved)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step gives beside new weights."""

    metrics: dict[str, float]
    """The step's metrics on rank 0, and nothing on the other ranks."""
    targets: Targets
    """The targets of this rank's batch, with the log-probs under theta_t."""


class Updater:
    """Holds policy and optimizer, and what the method needs: a critic, the initial policy for the
    KL, a second optimizer for supervised updates.

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
        memory: MemoryPlan | None = None,
    ) -> None:
        """memory: how a step fits the memory; None is as the configuration says, on a CPU."""
        self.config = config
        """The configuration of the next step."""
        self.policy, self.reference = policy, reference
        self.memory = memory or plan_memory(config, None)
        self.critic = None if critic is None else CriticTrainer(config, critic, ranks)
        self.ranks = ranks
        self.objective = get_objective(config.loss.objective.kind)
        self.optimizer = self._make_optimizer()
        self.supervised_optimizer = (
            self._make_optimizer() if config.demonstrations.supervise_every else None
        )
        """The AdamW of supervised updates (ReLIFT). Their gradients are tens of times as large as
        the others, so in one AdamW their moments would shrink and turn the other updates."""

    def _make_optimizer(self) -> AdamW:
        settings = self.config.optimizer
        return make_optimizer(self.policy, settings.learning_rate, settings)

    @property
    def modules(self) -> ModuleStates:
        """Every module that is trained and saved, with its optimizers, by name."""
        optimizers: dict[str, Optimizer] = {"optimizer": self.optimizer}
        if self.supervised_optimizer is not None:
            optimizers[SUPERVISED_OPTIMIZER] = self.supervised_optimizer
        modules: dict[str, tuple[nn.Module, dict[str, Optimizer]]]
        modules = {"model": (self.policy, optimizers)}
        if self.critic is not None:
            modules["critic"] = (self.critic.critic, {"critic_optimizer": self.critic.optimizer})
        return modules

    @property
    def _updated(self) -> dict[str, tuple[nn.Module, AdamW]]:
        """The modules that every update of a batch trains, with their optimizers, by name."""
        updated: dict[str, tuple[nn.Module, AdamW]] = {"model": (self.policy, self.optimizer)}
        if self.critic is not None:
            updated["critic"] = (self.critic.critic, self.critic.optimizer)
        return updated

    def modules_to_save(self, step: int) -> ModuleStates:
        """Returns the modules that the checkpoint after `step` stores."""
        if self.reference is None or not self.config.kl.resets_before(step):
            return self.modules
        return {**self.modules, "reference": (self.reference, {})}

    @torch.no_grad()
    def reset_reference(self) -> None:
        """Makes the policy as it is now the reference of the KL. Both have the same shards."""
        assert self.reference is not None
        pairs = zip(self.reference.parameters(), self.policy.parameters(), strict=True)
        for reference, trained in pairs:
            reference.copy_(trained)

    def step(
        self, step: int, batch: Batch, plan: Plan, window: tuple[float, float], timer: PhaseTimer
    ) -> StepOutcome:
        """Trains on the groups that `plan` gives to this rank, which are those of `batch`.

        window: [c2, c3] of the step, for the constants of Theorem 3.2.

        Raises `NonFiniteLoss` before an update that would spoil the weights.
        """
        self._set_rates(step)
        positions = plan.of_rank(self.ranks.rank)
        updates = [
            batch.rows_of([positions.index(p) for p in update[self.ranks.rank]])
            for update in plan.updates
        ]
        with timer.phase("proximal"):
            targets, metrics = self._make_targets(batch, step, self._rows_to_score(batch, updates))
        results = TokenResults.empty(batch)
        with timer.phase("update"):
            for index, rows in enumerate(updates):
                statistics = self._statistics(batch, rows, targets, positions, (step, index))
                count = sum(map(len, plan.updates[index]))
                totals = self._update(
                    batch, rows, count, targets, results, statistics, is_first=index == 0
                )
                for name, value in totals.items():
                    metrics[name] = metrics.get(name, 0.0) + value / len(plan.updates)
        metrics["updates"] = float(len(plan.updates))
        of_rank = StepResults.of_batch(step, batch, positions, targets, results)
        by_rank = self.ranks.gather_to_main(of_rank.as_dict())
        if by_rank:
            of_ranks = StepResults.concatenate([StepResults(**values) for values in by_rank])
            metrics |= diagnose(self.config, of_ranks, window)
        return StepOutcome(metrics if by_rank else {}, targets)

    def supervise(self, step: int, batch: Batch) -> dict[str, float]:
        """Takes one step of the supervised optimizer, on the tokens of all ranks' batches.

        The loss is the mean of -log pi - c H over the tokens, with the entropy H of the policy and
        c of `demonstrations.supervised_entropy_coefficient`. Returns the mean of -log pi and the
        norm of the loss's gradient, on every rank. Raises `NonFiniteLoss` before a step that would
        spoil the weights.
        """
        settings, optimizer = self.config.demonstrations, self.supervised_optimizer
        assert optimizer is not None, "the run has no supervised updates"
        self._set_rate(optimizer, self.config.optimizer.learning_rate, step)
        coefficient = settings.supervised_entropy_coefficient
        rows = torch.arange(len(batch.lengths))
        micro_batches = self._micro_batches(batch, rows, self.policy)
        order, device = row_order(micro_batches), self.policy.device
        (scale,) = send([self._loss_scale(batch.mask, rows, "token-mean")[order]], device)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch, rows_of in zip(micro_batches, row_slices(micro_batches), strict=True):
            logprobs, entropies = self._forward(micro_batch, self.policy, entropy=coefficient > 0)
            if micro_batch.rows is None:
                (logprobs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            grid, scale_of = micro_batch.grid, scale[rows_of]
            loss = -(grid.spread(logprobs) * scale_of).sum()
            total += loss.detach()
            if coefficient:
                loss = loss - coefficient * (grid.spread(entropies) * scale_of).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self._clip_gradient(self.policy, settings.supervised_gradient_clip)
        loss_value, norm_value = read([total, norm])
        totals = self.ranks.all_reduce_sum({"supervised/loss": float(loss_value)})
        totals["supervised/gradient_norm"] = float(norm_value)
        self._check_finite(totals, {"rows": rows, "batch": batch})
        optimizer.step()
        return totals

    # -- targets of the loss

    @torch.no_grad()
    def score(
        self, batch: Batch, policy: Policy | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Returns log-probs (N, R) of this rank's batch under `policy`, or the trained one now.

        rows: rows to score; None is all. The others get 0.
        """
        scored = policy or self.policy
        if rows is None:
            rows = torch.arange(len(batch.lengths))
        micro_batches = self._micro_batches(batch, rows, scored)
        logprobs = [self._forward(micro_batch, scored)[0] for micro_batch in micro_batches]
        scores = torch.zeros_like(batch.behavior_logprobs)
        for micro_batch, values in zip(micro_batches, read(logprobs), strict=True):
            if micro_batch.rows is not None:
                mask = batch.mask[micro_batch.rows]
                scores[micro_batch.rows] = torch.zeros(mask.shape).masked_scatter(
                    mask, values.float()
                )
        return scores

    def _forward(
        self, micro_batch: MicroBatch, policy: Policy, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns (log-probs, entropies), (K,) each, on the device."""
        scores: tuple[Tensor, Tensor] = policy(
            micro_batch.packed, self.config.rollout.temperature, entropy
        )
        return scores

    def _micro_batches(self, batch: Batch, rows: Tensor, policy: Policy) -> list[MicroBatch]:
        """Splits rows into micro-batches, padded so that all ranks have equally many."""
        budget = self.memory.microbatch_tokens
        parts: list[Tensor | None] = [
            *microbatches(batch, rows, budget, padded=not self.policy.packs)
        ]
        parts += [None] * (self.ranks.all_reduce_max(len(parts)) - len(parts))
        return [MicroBatch.of(batch, part, policy.device) for part in parts]

    def _rows_to_score(self, batch: Batch, updates: Sequence[Tensor]) -> Tensor:
        """Returns the rows that a pass of their own scores under theta_t, before any update.

        The forward pass of the first update scores its rows. Advantages with a KL penalty, weights
        that are divided by their mean, and statistics of the update need all scores before it.
        """
        config, all_rows = self.config, torch.arange(len(batch.lengths))
        penalised = config.kl.coefficient > 0 and config.kl.placement == "reward"
        if self.objective.statistics is not None or penalised or self._normalises_weights:
            return all_rows
        if config.loss.correction.kind == "behavior" and not self._uses_current_policy(batch):
            # For metrics, the groups of the first update are a random sample of the batch.
            return all_rows[:0]
        is_later = torch.ones(len(all_rows), dtype=torch.bool)
        is_later[updates[0]] = False
        return all_rows[is_later]

    @property
    def _normalises_weights(self) -> bool:
        correction = self.config.loss.correction
        return correction.kind != "behavior" and correction.weight_norm == "batch"

    def _uses_current_policy(self, batch: Batch) -> bool:
        """Returns whether the loss has a part in which theta_t occurs whatever the ratio is.

        Every rank calls it; the answer holds for the batches of all ranks.
        """
        has_demonstrations = self.ranks.all_reduce_max(int(batch.demonstrated.any()))
        config = self.config
        return config.loss.moves_center or config.kl.convex is not None or bool(has_demonstrations)

    def _make_targets(
        self, batch: Batch, step: int = 1, rows: Tensor | None = None
    ) -> tuple[Targets, dict[str, float]]:
        """Returns the constants of the step's loss, and the critic's metrics if there is one.

        rows: rows to score under theta_t; None is all.
        """
        kl = self.config.kl
        current = torch.full_like(batch.behavior_logprobs, torch.nan)
        scored = torch.zeros(len(batch.lengths), 1, dtype=torch.bool)
        scored[slice(None) if rows is None else rows] = True
        if self.ranks.all_reduce_max(int(scored.sum())):
            scores = self.score(batch, rows=torch.nonzero(scored)[:, 0])
            current = torch.where(scored, scores, current)
        initial = None
        if kl.coefficient > 0 and kl.reference == "initial":
            initial = self.score(batch, self.reference)
        mask = batch.mask
        if self.config.loss.mask_truncated:
            mask = mask & ~batch.truncated[:, None]
        targets = Targets(
            loss=self.config.loss,
            valid=batch.mask,
            mask=mask,
            advantages=torch.zeros_like(current),
            behavior_logprobs=batch.behavior_logprobs,
            current_logprobs=current,
            scored=scored,
            demonstrated=batch.demonstrated,
            replayed=batch.replayed,
            storage_logprobs=self._storage_logprobs(batch),
            initial_logprobs=initial,
            reference_share=kl.reference_share(step),
        )
        advantages, values, metrics = self._advantages(
            batch, targets.current_logprobs - targets.reference_logprobs
        )
        targets = replace(targets, advantages=advantages)
        if values is not None:
            targets = replace(targets, old_values=values.old_values, returns=values.returns)
        if self._normalises_weights:
            mean, _, _ = self.ranks.moments(targets.weights[mask])
            targets = replace(targets, weight_mean=mean or 1.0)
        return targets, metrics

    @cached_property
    def _estimator(self) -> Estimator:
        return get_estimator(self.config.advantage.estimator)

    def _advantages(
        self, batch: Batch, log_ratios: Tensor
    ) -> tuple[Tensor, ValueTargets | None, dict[str, float]]:
        """Returns (advantages (N, R), the critic's targets, the critic's metrics).

        log_ratios: (N, R) of the policy to the reference of the KL penalty, for the reward.
        """
        if self.critic is not None:
            all_rows = torch.arange(len(batch.lengths))
            return self.critic.advantages(batch, self._micro_batches(batch, all_rows, self.policy))
        kl, settings = self.config.kl, self.config.advantage
        penalties = torch.zeros_like(log_ratios)
        if kl.placement == "reward" and kl.coefficient > 0:
            penalties = kl.coefficient * log_ratios
        responses = Responses(batch.rewards, batch.mask, penalties, batch.sizes)
        advantages = self._estimator(responses, settings, self.ranks.moments)
        return advantages.expand_as(batch.behavior_logprobs), None, {}

    def _storage_logprobs(self, batch: Batch) -> Tensor | None:
        """Returns the log-probs (N, R) of the storage step, if `loss.correction` is `decoupled`.

        Raises `BapoError` if a replayed response has none.
        """
        if self.config.loss.correction.kind != "decoupled":
            return None
        storage = batch.storage_logprobs
        if storage is None:
            storage = torch.full_like(batch.behavior_logprobs, torch.nan)
        if bool((storage.isnan() & batch.replayed & batch.mask).any()):
            raise BapoError(
                "loss.correction=decoupled needs the log-probs of the storage step for every "
                "replayed group, and some have none: the run was started with another correction; "
                "start a new run"
            )
        return storage

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
        if self.objective.needs_uniforms:
            uniforms = draw_tokens(batch, positions, self.config.seed, *update)
            statistics = replace(statistics, uniforms=uniforms)
        if self.objective.statistics is None:
            return statistics
        # Before the step's first update, the policy is theta_t, whose log-probs are known.
        first = update[1] == 0
        scored = targets.current_logprobs if first else self.score(batch, rows=rows)
        statistics = replace(statistics, pre_update_logprobs=scored)
        tokens = tokens_of(
            targets.select(rows),
            scored[rows],
            pre_update_logprobs=scored[rows],
            uniforms=None if statistics.uniforms is None else statistics.uniforms[rows],
        )
        settings = self.config.loss.objective
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
        *,
        is_first: bool = False,
    ) -> dict[str, float]:
        """Accumulates gradients over micro-batches of `rows`, then takes one optimizer step.

        group_count: groups of the update, on all ranks. results: gets the results of `rows`.
        is_first: whether the policy is theta_t, whose scores `targets` then get where they are
        not known.
        """
        # It is no part of the scale, so that metrics are means whatever the size of the update.
        factor = 1.0
        if self.config.loss.minibatch_norm == "nominal":
            factor = group_count / self.config.optimizer.minibatch_prompts
        for _, optimizer in self._updated.values():
            optimizer.zero_grad(set_to_none=True)
        micro_batches = self._micro_batches(batch, rows, self.policy)
        order = row_order(micro_batches)
        scores_itself = is_first and not bool(targets.scored[order].all())
        inputs = self._update_inputs(batch, rows, targets, statistics)
        inputs = inputs.select(order).to(self.policy.device)
        passes = [
            (micro_batch, inputs.select(rows_of))
            for micro_batch, rows_of in zip(micro_batches, row_slices(micro_batches), strict=True)
        ]
        totals = Totals(self.policy.device, critic=self.critic is not None)
        if self.critic is not None:
            for micro_batch, part in passes:
                assert part.targets.values is not None
                loss = self.critic.backward(
                    micro_batch, part.targets.values, part.metric_scale, factor
                )
                totals.add({"critic/loss": loss})
        logprobs, clipped = [], []
        for micro_batch, part in passes:
            scores = self._forward(micro_batch, self.policy, entropy=True)
            if micro_batch.rows is None:
                (scores[0].sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            grid = micro_batch.grid
            if scores_itself:
                own_scores = grid.spread(scores[0].detach())
                part = replace(part, targets=part.targets.scored_by(own_scores))
            loss, is_clipped, metrics = self._loss(
                part, grid.spread(scores[0]), grid.spread(scores[1]), statistics
            )
            (loss * factor).backward()  # type: ignore[no-untyped-call]
            totals.add(metrics)
            logprobs.append(scores[0])
            clipped.append(grid.gather(is_clipped))
        clip = self.config.optimizer.gradient_clip
        norms = {
            "" if name == "model" else f"{name}/": self._clip_gradient(module, clip)
            for name, (module, _) in self._updated.items()
        }
        # The only time in an update that the host waits for the device.
        values = read([totals.sums, *norms.values(), *logprobs, *clipped])
        results_of_update = self.ranks.all_reduce_sum(totals.named(values[0])) | statistics.values
        results_of_update |= {
            f"{prefix}gradient_norm": float(norm)
            for prefix, norm in zip(norms, values[1:], strict=False)
        }
        evidence = {"rows": rows, "batch": batch, "targets": targets}
        self._check_finite(results_of_update, evidence)
        for _, optimizer in self._updated.values():
            optimizer.step()
        of_tokens = values[1 + len(norms) :]
        results.record(order, of_tokens[: len(logprobs)], of_tokens[len(logprobs) :], batch.mask)
        if scores_itself:
            targets.current_logprobs[order] = results.logprobs[order]
            targets.scored[order] = True
        return results_of_update

    def _update_inputs(
        self, batch: Batch, rows: Tensor, targets: Targets, statistics: UpdateStatistics
    ) -> UpdateInputs:
        """Returns the constants of an update on `rows`, for all rows of the batch."""
        scale = self._loss_scale(targets.mask, rows, self.config.loss.aggregation)
        masks = {}
        if self.config.loss.by_source:
            sources = batch.sources
            masks = {
                source: torch.tensor([name == source for name in sources])[:, None]
                for source in set(sources)
            }
        return UpdateInputs(
            targets,
            scale,
            self._metric_scale(targets.mask, rows, scale),
            statistics.pre_update_logprobs,
            statistics.uniforms,
            masks,
        )

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

    def _clip_gradient(self, module: nn.Module, largest: float) -> Tensor:
        """Clips the gradient in place to the global norm `largest`; returns its norm before."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), largest)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.to(self.policy.device)

    def _loss(
        self,
        inputs: UpdateInputs,
        logprobs: Tensor,
        entropy: Tensor,
        statistics: UpdateStatistics,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the share of a micro-batch's rows in the update's loss, their clipped tokens
        (n, R), and their shares of its metrics.

        logprobs, entropy: (n, R) of the rows, 0 where masked.
        """
        settings, kl, targets = self.config.loss, self.config.kl, inputs.targets
        kl_coefficient = kl.coefficient if kl.placement == "loss" else 0.0
        tokens = tokens_of(
            targets,
            logprobs,
            pre_update_logprobs=inputs.pre_update_logprobs,
            uniforms=inputs.uniforms,
        )
        if inputs.sources:
            policy_losses, clipped = losses_by_source(
                self.objective, tokens, inputs.sources, settings, statistics.values
            )
        else:
            policy_losses, clipped = self.objective.loss(
                tokens, settings.objective, statistics.values
            )

        def penalty_to(reference: Tensor) -> Tensor:
            behavior = targets.behavior_logprobs
            return kl_penalty(logprobs, reference, behavior, targets.mask, estimator=kl.estimator)

        penalty = penalty_to(targets.reference_logprobs)
        if targets.reference_share < 1.0:
            penalty = torch.lerp(
                penalty_to(targets.current_logprobs), penalty, targets.reference_share
            )
        losses = policy_losses + kl_coefficient * penalty
        if settings.entropy_coefficient:
            losses = losses - settings.entropy_coefficient * entropy
        loss = (losses * inputs.scale).sum()
        share = (targets.mask * inputs.metric_scale).sum().double()
        clip_fraction = clipped.sum() / targets.mask.sum().clamp(min=1).double()
        return (
            loss,
            clipped,
            {
                "loss": loss.detach(),
                "kl": (penalty.detach() * inputs.metric_scale).sum(),
                "entropy": (entropy.detach() * inputs.metric_scale).sum(),
                "clip_fraction": share * clip_fraction,
            },
        )

    def _set_rates(self, step: int) -> None:
        rates = {"model": self.config.optimizer.learning_rate}
        if self.critic is not None:
            rates["critic"] = self.critic.settings.critic.learning_rate
        for name, (_, optimizer) in self._updated.items():
            self._set_rate(optimizer, rates[name], step)

    def _set_rate(self, optimizer: AdamW, rate: float, step: int) -> None:
        """Sets what a restored optimizer would otherwise keep of the step that it was stored at."""
        for group in optimizer.param_groups:
            group["lr"] = rate * self._warmup(step)
            group["weight_decay"] = self.config.optimizer.weight_decay

    def _warmup(self, step: int) -> float:
        """Returns the factor of the learning rates in the linear warm-up."""
        steps = self.config.optimizer.warmup_steps
        return min(1.0, step / steps) if steps else 1.0

    @staticmethod
    def _check_finite(totals: dict[str, float], evidence: dict[str, Any]) -> None:
        wrong = [name for name, value in totals.items() if not math.isfinite(value)]
        if wrong:
            raise NonFiniteLoss(
                f"{' and '.join(wrong)} not finite: stopped before the optimizer step; continue "
                "the run with a lower optimizer.learning_rate (without one, the step is repeated)",
                {"totals": totals, **evidence},
            )


class Totals:
    """Sums of an update's metrics over its micro-batches, on the device.

    Every rank has the same ones, also a rank that has no rows of the update.
    """

    def __init__(self, device: torch.device, *, critic: bool = False) -> None:
        self._names = ["loss", "kl", "entropy", "clip_fraction", *(["critic/loss"] * critic)]
        self.sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        """Sums by the order of their names."""

    def add(self, values: dict[str, Tensor]) -> None:
        """Adds 0-dimensional values of the device."""
        zero = self.sums.new_zeros(())
        self.sums += torch.stack([values.get(name, zero).double() for name in self._names])

    def named(self, sums: Tensor) -> dict[str, float]:
        """Returns the values of `sums`, which were read from the device, by name."""
        return dict(zip(self._names, sums.tolist(), strict=True))
