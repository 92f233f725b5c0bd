"""One training step on one batch: proximal log-probs, minibatches, clip, optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bapo_core.advantages import group_relative
from bapo_core.config import RunConfig
from bapo_core.importance import mismatch_metrics, truncated_weights
from bapo_core.kl import kl_penalty
from bapo_core.losses import clip_fraction, clipped_surrogate, token_scale
from bapo_core.seeding import derive_rng
from bapo_core.theory import (
    SourceTerm,
    improvement_constants,
    policy_improvement_bound,
    total_variation_estimate,
)
from bapo_core.types import Source
from services.buffer.timeline import Timeline
from services.common.errors import BapoError
from services.trainer.data import Batch, microbatches
from services.trainer.policy import response_logprobs


class NonFiniteLoss(BapoError):
    """The loss or the gradient is not a number; the weights were left as they were."""


@dataclass
class Clock:
    """Seconds by phase, and for the timeline when they were."""

    timeline: Timeline | None = None
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if self.timeline is not None:
                self.timeline.note(name, self.step, started)

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


class Updater:
    """Holds the model, its optimizer and, where the KL needs it, the initial model."""

    def __init__(
        self, config: RunConfig, model: nn.Module, reference: nn.Module | None = None
    ) -> None:
        self.config, self.model, self.reference = config, model, reference
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(
        self, step: int, batch: Batch, window: tuple[float, float], clock: Clock
    ) -> dict[str, float]:
        """Trains on `batch`; returns what there is to know about it.

        window: [c2, c3] of the step, for the constants of Theorem 3.2.

        Raises `NonFiniteLoss` before an update that would spoil the weights.
        """
        self._set_learning_rate(step)
        with clock.phase("proximal"):
            targets = self._targets(batch)
        new = torch.zeros_like(targets.current)
        totals: dict[str, float] = {}
        parts = self._minibatches(step, batch)
        with clock.phase("update"):
            for groups in parts:
                found = self._update(batch, batch.rows_of(groups), len(groups), targets, new)
                for name, value in found.items():
                    totals[name] = totals.get(name, 0.0) + value / len(parts)
        return totals | self._diagnose(batch, window, targets, new) | {"updates": float(len(parts))}

    # -- what the loss is measured against

    @torch.no_grad()
    def score(self, batch: Batch, model: nn.Module | None = None) -> Tensor:
        """(N, R) log-probs of the whole batch under the model as it is now."""
        scores = torch.zeros_like(batch.behavior)
        everything = torch.arange(len(batch.lengths))
        for rows in self._micro(batch, everything):
            found, _ = response_logprobs(
                model or self.model, batch, rows, self.config.rollout.temperature
            )
            scores[rows] = found
        return scores

    def _targets(self, batch: Batch) -> Targets:
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
        per_response = group_relative(
            batch.rewards, std=self.config.advantage.std, eps=self.config.advantage.eps
        ).flatten()
        return Targets(
            advantages=per_response[:, None].expand_as(batch.behavior),
            proximal=proximal,
            weights=weights,
            reference=reference,
            center=(current - batch.behavior).exp() if loss.clip_center == "current" else None,
            current=current,
        )

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

    def _minibatches(self, step: int, batch: Batch) -> list[list[int]]:
        order = list(range(len(batch.members)))
        derive_rng(self.config.seed, "minibatch", step).shuffle(order)
        size = self.config.optimizer.minibatch_prompts
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _micro(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        return microbatches(batch.lengths, rows, self.config.optimizer.microbatch_tokens)

    def _update(
        self, batch: Batch, rows: Tensor, group_count: int, targets: Targets, new: Tensor
    ) -> dict[str, float]:
        """Gradients over micro-batches, then one optimizer step."""
        scale = torch.zeros_like(batch.behavior)
        scale[rows] = token_scale(batch.mask[rows], self.config.loss.aggregation)
        if self.config.loss.norm == "nominal":
            scale *= group_count / self.config.optimizer.minibatch_prompts
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        for part in self._micro(batch, rows):
            loss, found = self._loss(batch, part, targets, scale[part], new)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.optimizer.gradient_clip
        )
        totals["gradient_norm"] = float(norm)
        self._check_finite(totals)
        self.optimizer.step()
        return totals

    def _loss(
        self, batch: Batch, rows: Tensor, targets: Targets, scale: Tensor, new: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of some rows, already divided by the whole minibatch's normaliser (`scale`)."""
        settings, kl = self.config.loss, self.config.kl
        bonus = settings.entropy_coefficient
        logprobs, entropy = response_logprobs(
            self.model, batch, rows, self.config.rollout.temperature, entropy=True
        )
        new[rows] = logprobs.detach()
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
        loss = ((policy + kl.coefficient * penalty - bonus * entropy) * scale).sum()
        share = float((mask * scale).sum())
        return loss, {
            "loss": float(loss.detach()),
            "kl": float((penalty.detach() * scale).sum()),
            "entropy": float((entropy.detach() * scale).sum()),
            "clip_fraction": share
            * clip_fraction(
                *arguments,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                clip_center=center,
            ),
        }

    def _set_learning_rate(self, step: int) -> None:
        settings = self.config.optimizer
        warm = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm

    @staticmethod
    def _check_finite(totals: dict[str, float]) -> None:
        wrong = [name for name, value in totals.items() if not torch.isfinite(torch.tensor(value))]
        if wrong:
            raise NonFiniteLoss(
                f"{' and '.join(wrong)} not finite: stopped before the optimizer step; lower "
                "optimizer.learning_rate, then continue with `bapo run --resume`"
            )

    # -- diagnosis

    def _diagnose(
        self, batch: Batch, window: tuple[float, float], targets: Targets, new: Tensor
    ) -> dict[str, float]:
        """How far the data is off-policy, and the lower bound of Theorem 3.2.

        theta is the policy at the time it trained on each minibatch: the last update of a step is
        not in it, which spares a pass over the batch.
        """
        settings = self.config.loss
        mismatch = mismatch_metrics(
            targets.current,
            batch.behavior,
            batch.mask,
            cap=settings.weight_cap,
            level=settings.weight_level,
        )
        return {f"mismatch/{key}": value for key, value in mismatch.items()} | self._bound(
            batch, window, targets, new
        )

    def _bound(
        self, batch: Batch, window: tuple[float, float], targets: Targets, new: Tensor
    ) -> dict[str, float]:
        config = self.config
        eps = config.advantage.eps
        constants = dict(
            zip(
                Source,
                improvement_constants(config.rollout.group_size, config.x2.c1, *window, eps),
                strict=True,
            )
        )
        before = _sequence_log_ratios(targets.current, batch)
        after = _sequence_log_ratios(new, batch)
        advantages = targets.advantages[:, 0]
        sources = [batch.members[index].source for index in batch.group.tolist()]
        terms: dict[Source, SourceTerm] = {}
        for source in Source:
            rows = torch.tensor([found == source for found in sources])
            if not rows.any():
                continue
            gain = (after[rows].clamp(max=20.0).exp() * advantages[rows]).mean()
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


def _sequence_log_ratios(logprobs: Tensor, batch: Batch) -> Tensor:
    """(N,) log pi(y) - log alpha(y) of whole responses."""
    return ((logprobs - batch.behavior) * batch.mask).sum(dim=1)


def group_rows(batch: Batch, values: Tensor) -> Sequence[list[list[float]]]:
    """Per group, per response, the valid entries of `values` (N, R)."""
    found: list[list[list[float]]] = [[] for _ in batch.members]
    for row, index in enumerate(batch.group.tolist()):
        found[index].append(values[row][batch.mask[row]].tolist())
    return found
