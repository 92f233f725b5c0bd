"""One training step on one batch: proximal log-probs, minibatches, clip, optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from bapo_core.advantages import group_relative
from bapo_core.config import RunConfig
from bapo_core.errors import BapoError, TransientError
from bapo_core.importance import mismatch_metrics, truncated_weights
from bapo_core.kl import kl_penalty
from bapo_core.losses import (
    clip_fraction,
    clipped_surrogate,
    clipped_tokens,
    scale_count,
    token_scale,
)
from bapo_core.theory import (
    SourceTerm,
    improvement_constants,
    policy_improvement_bound,
    total_variation_estimate,
)
from bapo_core.types import Source
from services.buffer.api.spans import SpanRecorder
from services.trainer.checkpoint import Trained
from services.trainer.critic import Critic, CriticTrainer, ValueTargets
from services.trainer.data import PADDING, Batch, Plan, microbatches
from services.trainer.optimizer import make_optimizer
from services.trainer.policy import Policy, response_logprobs
from services.trainer.ranks import Ranks


class NonFiniteLoss(TransientError):
    """The loss or the gradient is not a number; the weights were left as they were."""

    def __init__(self, message: str, evidence: dict[str, Any] | None = None) -> None:
        """evidence: what this rank trained on."""
        super().__init__(message)
        self.evidence = evidence or {}


@dataclass
class Clock:
    """Seconds by phase, and for the timeline when they were."""

    recorder: SpanRecorder | None = None
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            with record_function(name):  # what a trace shows around its operations
                yield
        finally:
            spent = time.monotonic() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if self.recorder is not None:
                self.recorder.record(name, self.step, started)

    def take(self) -> dict[str, float]:
        """Seconds by phase since they were taken last, as metrics."""
        taken = {f"seconds/{name}": spent for name, spent in self.seconds.items()}
        self.seconds.clear()
        return taken


@dataclass(frozen=True, slots=True)
class Targets:
    """What the loss compares the current policy with, all (N, R) and constant."""

    advantages: Tensor
    proximal: Tensor
    """Denominator of the PPO ratio."""
    weights: Tensor
    """Importance weights: proximal over behaviour, truncated."""
    reference: Tensor
    """Log-probs of the policy that the KL is taken to."""
    center: Tensor | None
    """Centre of the clip, where it is not 1."""
    current: Tensor
    """log theta_t: the policy before this step's first update."""
    values: ValueTargets | None = None
    """For the critic, if there is one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each token when it was trained on, (N, R); filled in update by update."""

    logprobs: Tensor
    cut: Tensor
    """Whether the clip cut its gradient off."""

    @classmethod
    def of(cls, batch: Batch) -> Outcome:
        return cls(torch.zeros_like(batch.behavior), torch.zeros_like(batch.mask))


class Updater:
    """Holds the policy, its optimizer and, where the KL needs it, the initial policy.

    All ranks call the same methods in the same order, each with its own part of the batch. A rank
    that has less to do passes padding through the model meanwhile: its shards are needed.
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
        self.optimizer = make_optimizer(policy, config.optimizer.learning_rate, config.optimizer)

    @property
    def trained(self) -> Trained:
        """What is trained and saved, by name."""
        found: Trained = {"model": (self.policy, self.optimizer)}
        if self.critic is not None:
            found["critic"] = (self.critic.critic, self.critic.optimizer)
        return found

    def step(
        self, step: int, batch: Batch, plan: Plan, window: tuple[float, float], clock: Clock
    ) -> dict[str, float]:
        """Trains on what `plan` gives to this rank, which is `batch`; returns what there is to
        know about the step on rank 0, and nothing on the others.

        window: [c2, c3] of the step, for the constants of Theorem 3.2.

        Raises `NonFiniteLoss` before an update that would spoil the weights.
        """
        self._set_learning_rate(step)
        with clock.phase("proximal"):
            targets, totals = self._targets(batch)
        outcome = Outcome.of(batch)
        mine = plan.of_rank(self.ranks.rank)
        with clock.phase("update"):
            for update in plan.updates:
                rows = batch.rows_of([mine.index(place) for place in update[self.ranks.rank]])
                found = self._update(batch, rows, sum(map(len, update)), targets, outcome)
                for name, value in found.items():
                    totals[name] = totals.get(name, 0.0) + value / len(plan.updates)
        totals["updates"] = float(len(plan.updates))
        scored = Scored.of(batch, mine, targets, outcome)
        parts = self.ranks.gathered(scored)
        return totals | self._diagnose(Scored.joined(parts), window) if parts else {}

    # -- what the loss is measured against

    @torch.no_grad()
    def score(self, batch: Batch, policy: Policy | None = None) -> Tensor:
        """(N, R) log-probs of this rank's batch under the policy as it is now."""
        scores = torch.zeros_like(batch.behavior)
        everything = torch.arange(len(batch.lengths))
        for rows in self._micro(batch, everything):
            logprobs, _ = self._pass(batch, rows, policy or self.policy)
            if rows is not None:
                scores[rows] = logprobs
        return scores

    def _pass(
        self, batch: Batch, rows: Tensor | None, policy: Policy, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), (len(rows), R); of padding where there are no rows."""
        temperature = self.config.rollout.temperature
        if rows is None:
            return policy(PADDING.to(policy.device), temperature, entropy)  # type: ignore[no-any-return]
        return response_logprobs(policy, batch, rows, temperature, entropy=entropy)

    def _micro(self, batch: Batch, rows: Tensor) -> list[Tensor | None]:
        """As many parts on every rank: None where this one has nothing more to do."""
        parts = microbatches(batch.lengths, rows, self.config.optimizer.microbatch_tokens)
        count = self.ranks.largest(len(parts))
        return [*parts, *[None] * (count - len(parts))]

    def _targets(self, batch: Batch) -> tuple[Targets, dict[str, float]]:
        """What the loss compares with, and what is worth knowing of it."""
        loss, kl = self.config.loss, self.config.kl
        current = self.score(batch)
        proximal = self._proximal(batch, current)
        if loss.ratio == "behavior":
            weights = batch.mask.float()
        else:
            weights = truncated_weights(
                proximal, batch.behavior, batch.mask, cap=loss.weight_cap, level=loss.weight_level
            )
        reference = batch.behavior
        if kl.coefficient > 0 and kl.reference == "initial":
            reference = self.score(batch, self.reference)
        advantages, values, metrics = self._advantages(batch)
        targets = Targets(
            advantages=advantages,
            proximal=proximal,
            weights=weights,
            reference=reference,
            center=(current - batch.behavior).exp() if loss.clip_center == "current" else None,
            current=current,
            values=values,
        )
        return targets, metrics

    def _advantages(self, batch: Batch) -> tuple[Tensor, ValueTargets | None, dict[str, float]]:
        """(N, R), with what the critic is to learn, if there is one."""
        if self.critic is not None:
            everything = torch.arange(len(batch.lengths))
            return self.critic.advantages(batch, self._micro(batch, everything))
        per_response = group_relative(
            batch.rewards, std=self.config.advantage.std, eps=self.config.advantage.eps
        ).flatten()
        return per_response[:, None].expand_as(batch.behavior), None, {}

    def _proximal(self, batch: Batch, current: Tensor) -> Tensor:
        """Denominator of the PPO ratio, by `loss.ratio`."""
        match self.config.loss.ratio:
            case "prox_current":
                return current
            case "behavior":
                return batch.behavior
            case "decoupled":
                replayed = torch.tensor(
                    [member.source == Source.REPLAYED for member in batch.members]
                )[batch.group][:, None]
                storage = batch.storage
                if storage is None:
                    storage = torch.full_like(current, torch.nan)
                if bool((storage.isnan() & replayed & batch.mask).any()):
                    raise BapoError(
                        "ratio=decoupled needs the log-probs of the storage step for every "
                        "replayed group, and some have none; was the run started with another "
                        "ratio? Start a new run"
                    )
                return torch.where(replayed, storage, current)

    # -- one optimizer update

    def _update(
        self,
        batch: Batch,
        rows: Tensor,
        group_count: int,
        targets: Targets,
        outcome: Outcome,
    ) -> dict[str, float]:
        """Gradients over micro-batches, then one optimizer step.

        group_count: groups of the update, on all ranks. outcome: gets what becomes of `rows`.
        """
        scale = torch.zeros_like(batch.behavior)
        scale[rows] = self._scale(batch.mask[rows], group_count)
        for _, optimizer in self.trained.values():
            optimizer.zero_grad(set_to_none=True)
        totals = dict.fromkeys(("loss", "kl", "entropy", "clip_fraction"), 0.0)
        parts = self._micro(batch, rows)
        if self.critic is not None and targets.values is not None:
            totals["critic/loss"] = sum(
                self.critic.backward(batch, part, targets.values, scale) for part in parts
            )
        for part in parts:
            if part is None:
                logprobs, _ = self._pass(batch, None, self.policy, entropy=True)
                (logprobs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                continue
            loss, found = self._loss(batch, part, targets, scale[part], outcome)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in found.items():
                totals[name] += value
        totals = self.ranks.summed(totals)
        for name, (module, _) in self.trained.items():
            prefix = "" if name == "model" else f"{name}/"
            totals[f"{prefix}gradient_norm"] = self._clip_gradient(module)
        self._check_finite(totals, {"rows": rows, "batch": batch, "targets": targets})
        for _, optimizer in self.trained.values():
            optimizer.step()
        return totals

    def _scale(self, mask: Tensor, group_count: int) -> Tensor:
        """What the losses of this rank's tokens are multiplied by, (n, R): shares of the whole
        update, so that the sum over ranks is its aggregate."""
        settings = self.config.loss
        own = {"count": float(scale_count(mask, settings.aggregation))}
        count = int(self.ranks.summed(own)["count"])
        scale = token_scale(mask, settings.aggregation, count=count)
        if settings.norm == "nominal":
            scale = scale * (group_count / self.config.optimizer.minibatch_prompts)
        return scale

    def _clip_gradient(self, module: nn.Module) -> float:
        """The norm before."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), self.config.optimizer.gradient_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _loss(
        self,
        batch: Batch,
        rows: Tensor,
        targets: Targets,
        scale: Tensor,
        outcome: Outcome,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of some rows, already divided by the whole update's normaliser (`scale`)."""
        settings, kl = self.config.loss, self.config.kl
        bonus = settings.entropy_coefficient
        logprobs, entropy = self._pass(batch, rows, self.policy, entropy=True)
        outcome.logprobs[rows] = logprobs.detach()
        mask = batch.mask[rows]
        center = None if targets.center is None else targets.center[rows]
        arguments = (logprobs, targets.proximal[rows], targets.advantages[rows], mask)
        policy = clipped_surrogate(
            *arguments,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            weights=targets.weights[rows],
            clip_center=center,
        )
        penalty = kl_penalty(logprobs, targets.reference[rows], mask, estimator=kl.estimator)
        losses = policy + kl.coefficient * penalty
        if bonus:
            losses = losses - bonus * entropy
        loss = (losses * scale).sum()
        cut = outcome.cut[rows] = clipped_tokens(
            *arguments,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            clip_center=center,
        )
        share = float((mask * scale).sum())
        return loss, {
            "loss": float(loss.detach()),
            "kl": float((penalty.detach() * scale).sum()),
            "entropy": float((entropy.detach() * scale).sum()),
            "clip_fraction": share * clip_fraction(cut, mask),
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
                f"{' and '.join(wrong)} not finite: stopped before the optimizer step; lower "
                "optimizer.learning_rate, then continue with `bapo run --resume`",
                {"totals": totals, **evidence},
            )

    # -- diagnosis

    def _diagnose(self, scored: Scored, window: tuple[float, float]) -> dict[str, float]:
        """How far the data is off-policy, and the lower bound of Theorem 3.2.

        theta is the policy at the time it trained on each update: the last update of a step is
        not in it, which spares a pass over the batch.
        """
        settings = self.config.loss
        mismatch = mismatch_metrics(
            scored.current,
            scored.behavior,
            scored.mask,
            cap=settings.weight_cap,
            level=settings.weight_level,
        )
        return {
            "trained_tokens": float(scored.mask.sum()),
            "response_length": float(scored.mask.sum(dim=1).float().mean()),
            **{f"mismatch/{key}": value for key, value in mismatch.items()},
            **scored.clip_fractions(),
            # The theorem is about advantages within groups.
            **({} if self.critic is not None else self._bound(scored, window)),
        }

    def _bound(self, scored: Scored, window: tuple[float, float]) -> dict[str, float]:
        config = self.config
        eps = config.advantage.eps
        constants = dict(
            zip(
                Source,
                improvement_constants(
                    config.rollout.group_size, config.reevaluate.c1, *window, eps
                ),
                strict=True,
            )
        )
        before, after = scored.sequence_log_ratios()
        terms: dict[Source, SourceTerm] = {}
        for source in Source:
            rows = torch.tensor([found == source for found in scored.sources])
            if not rows.any():
                continue
            gain = (after[rows].clamp(max=20.0).exp() * scored.advantages[rows]).mean()
            terms[source] = SourceTerm(
                surrogate=float(gain),
                constant=constants[source],
                tv_new=total_variation_estimate(after[rows].tolist()),
                tv_old=total_variation_estimate(before[rows].tolist()),
            )
        metrics = {f"theory/k_{source.value}": value for source, value in constants.items()}
        for source, term in terms.items():
            metrics[f"theory/tv_{source.value}"] = term.tv_new
            metrics[f"theory/bound_{source.value}"] = term.bound
        return metrics | {"theory/bound": policy_improvement_bound(terms)}


@dataclass(frozen=True, slots=True)
class Scored:
    """Responses of a step and what was found of them: (N, R), and (N,) from `advantages` on."""

    behavior: Tensor
    current: Tensor
    """Log-probs before the step's first update."""
    new: Tensor
    """Log-probs when each was trained on."""
    cut: Tensor
    """Whether the clip cut its gradient off then."""
    mask: Tensor
    advantages: Tensor
    sources: list[str]
    places: Tensor
    """Of each response's group in the manifest."""

    @classmethod
    def of(cls, batch: Batch, places: Sequence[int], targets: Targets, outcome: Outcome) -> Scored:
        """`places` of the batch's groups in the manifest."""
        return cls(
            behavior=batch.behavior,
            current=targets.current,
            new=outcome.logprobs,
            cut=outcome.cut,
            mask=batch.mask,
            advantages=targets.advantages[:, 0],
            sources=[batch.members[index].source for index in batch.group.tolist()],
            places=torch.tensor(places, dtype=torch.long)[batch.group],
        )

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """In the manifest's order, whoever had which group."""
        widest = max(part.mask.shape[1] for part in parts)
        order = torch.argsort(torch.cat([part.places for part in parts]), stable=True)
        sources = [source for part in parts for source in part.sources]

        def together(name: str) -> Tensor:
            found = [getattr(part, name) for part in parts]
            if found[0].dim() == 2:
                found = [nn.functional.pad(each, (0, widest - each.shape[1])) for each in found]
            return torch.cat(found)[order]

        return cls(
            **{
                name: together(name)
                for name in ("behavior", "current", "new", "cut", "mask", "advantages", "places")
            },
            sources=[sources[index] for index in order.tolist()],
        )

    def clip_fractions(self) -> dict[str, float]:
        """By source: replayed groups are the furthest from the policy, and are clipped the most."""
        found = {}
        for source in Source:
            rows = torch.tensor([each == source for each in self.sources])
            if rows.any():
                found[f"clip_fraction/{source.value}"] = clip_fraction(
                    self.cut[rows], self.mask[rows]
                )
        return found

    def sequence_log_ratios(self) -> tuple[Tensor, Tensor]:
        """(N,) log theta(y) - log behaviour(y) of whole responses, before and after."""
        before, after = (
            ((logprobs - self.behavior) * self.mask).sum(dim=1)
            for logprobs in (self.current, self.new)
        )
        return before, after


def group_rows(batch: Batch, values: Tensor) -> Sequence[list[list[float]]]:
    """Per group, per response, the valid entries of `values` (N, R)."""
    found: list[list[list[float]]] = [[] for _ in batch.members]
    for row, index in enumerate(batch.group.tolist()):
        found[index].append(values[row][batch.mask[row]].tolist())
    return found
