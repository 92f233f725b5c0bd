"""Diagnoses a finished step: mismatch with the engine, clipping, the bound of Theorem 3.2."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bapo_core.advantages import group_variance
from bapo_core.config import RunConfig
from bapo_core.config.estimators import GroupAdvantageConfig
from bapo_core.importance import mismatch_metrics, weight_metrics
from bapo_core.losses import clip_fraction
from bapo_core.metrics import AGES
from bapo_core.theory import (
    ImprovementTerm,
    improvement_constants,
    policy_improvement_bound,
    stability_constant,
    total_variation_estimate,
)
from bapo_core.types import DEMONSTRATED, ESS_DECAY, Source
from services.trainer.data import Batch
from services.trainer.targets import Targets, TokenResults

MAX_SEQUENCE_RATIO = 10.0
"""Cap of theta(y) / behaviour(y) of a response in the bound's surrogate, which without it is
whatever the least likely response makes of it."""


@dataclass(frozen=True, slots=True)
class StepResults:
    """The responses of a step and how they were trained on: (N, R), or (N,) where noted."""

    behavior_logprobs: Tensor
    current_logprobs: Tensor
    """Log-probs under theta_t, before the step's first update."""
    proximal_logprobs: Tensor
    """Log-probs in the denominator of the PPO ratio, by `loss.correction`."""
    new_logprobs: Tensor
    """Log-probs when the response was trained on."""
    clipped: Tensor
    """Whether the objective then cut the token's gradient off, or bounded its weight."""
    mask: Tensor
    trained: Tensor
    """Tokens that have a loss: those of all responses, or only of complete ones."""
    advantages: Tensor
    """(N,) advantage of each response."""
    rewards: Tensor
    """(N,) reward of each response."""
    variances: Tensor
    """(N,) variance of the rewards in each response's group."""
    sources: list[str]
    """(N,) source of each response."""
    positions: Tensor
    """(N,) position of each response's group among those of the manifest."""
    ages: Tensor
    """(N,) steps between the policy that sampled the response and the step."""
    scored: Tensor
    """(N,) whether theta_t has scored the response: all of them, or under `correction: behavior`
    those of the step's first update, a random sample of the groups."""

    @classmethod
    def of_batch(
        cls,
        step: int,
        batch: Batch,
        positions: Sequence[int],
        targets: Targets,
        results: TokenResults,
    ) -> StepResults:
        """positions: places of the batch's groups among those of the manifest."""
        versions = torch.tensor([member.policy_version for member in batch.members])
        return cls(
            behavior_logprobs=batch.behavior_logprobs,
            current_logprobs=targets.current_logprobs,
            proximal_logprobs=targets.proximal_logprobs,
            new_logprobs=results.logprobs,
            clipped=results.clipped,
            mask=batch.mask,
            trained=targets.mask,
            advantages=targets.advantages[:, 0],
            rewards=batch.row_rewards,
            variances=group_variance(batch.rewards, batch.sizes)[batch.group],
            sources=batch.sources,
            positions=torch.tensor(positions, dtype=torch.long)[batch.group],
            ages=step - versions[batch.member],
            scored=targets.scored[:, 0],
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def concatenate(cls, by_rank: Sequence[StepResults]) -> StepResults:
        """Puts the ranks' results together in the manifest's order, padded to the widest."""
        width = max(results.mask.shape[1] for results in by_rank)
        order = torch.argsort(torch.cat([results.positions for results in by_rank]), stable=True)
        sources = [source for results in by_rank for source in results.sources]

        def concatenated(name: str) -> Tensor:
            tensors: list[Tensor] = [getattr(results, name) for results in by_rank]
            if tensors[0].dim() == 2:
                tensors = [pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
            return torch.cat(tensors)[order]

        tensors = {f.name: concatenated(f.name) for f in fields(cls) if f.name != "sources"}
        return cls(**tensors, sources=[sources[index] for index in order.tolist()])

    def rows_from(self, source: str) -> Tensor:
        """Returns a mask (N,) of the responses that come from `source`."""
        return torch.tensor([name == source for name in self.sources], dtype=torch.bool)

    @property
    def sampled(self) -> Tensor:
        """(N, R) tokens that a policy sampled: the tokens of all responses but demonstrations."""
        return self.mask & ~self.rows_from(DEMONSTRATED)[:, None]

    def clip_fractions(self) -> dict[str, float]:
        """Returns the clip fraction by source; replayed groups are the furthest from the policy."""
        fractions = {}
        for source in sorted(set(self.sources)):
            rows = self.rows_from(source)
            fraction = clip_fraction(self.clipped[rows], self.trained[rows])
            fractions[f"clip_fraction/{source}"] = fraction
        return fractions

    def divergences(self) -> dict[str, float]:
        """Returns how far theta_t is from the policies that sampled, by source and by age.

        kl: KL(behaviour || theta_t) in nats a token (k3). ess_fraction: effective share of the
        tokens under their ratios theta_t / behaviour, (sum w)^2 / (n sum w^2). By age, also the
        share of tokens that the objective clipped. ess_decay: decay d of ess_fraction with the age
        a in steps, as exp(-d a) (`_ess_decay`). Demonstrations, which no policy sampled, and
        responses that theta_t has not scored are left out.
        """
        sampled = self.sampled & self.scored[:, None]
        parts = {source: self.rows_from(source) for source in sorted(set(self.sources))}
        parts |= {
            f"age_{name}": (self.ages >= first) & (self.ages <= last) for name, first, last in AGES
        }
        metrics = {}
        for name, rows in parts.items():
            mask = sampled & rows[:, None]
            if not mask.any():
                continue
            logprobs = self.current_logprobs, self.behavior_logprobs, mask
            metrics[f"divergence/{name}/kl"] = mismatch_metrics(*logprobs)["mismatch_kl"]
            ess = weight_metrics(*logprobs, cap=math.inf)["ess_fraction"]
            metrics[f"divergence/{name}/ess_fraction"] = ess
            if name.startswith("age_"):
                clipped = clip_fraction(self.clipped[rows], self.trained[rows])
                metrics[f"divergence/{name}/clip_fraction"] = clipped
        decay = self._ess_decay(sampled)
        return metrics if decay is None else metrics | {ESS_DECAY: decay}

    def _ess_decay(self, sampled: Tensor) -> float | None:
        """Returns the decay per step of the effective share of tokens with their age; None if all
        tokens are of the current policy.

        Of the tokens of each age a > 0, n_a in number, the effective share is ess_a. The decay is
        sum_a n_a (-log ess_a) / sum_a n_a a: a line through the origin, since a policy's own tokens
        have an effective share of 1.

        sampled: (N, R) the tokens that count.
        """
        losses = steps = 0.0
        for age in sorted(set(self.ages[self.ages > 0].tolist())):
            mask = sampled & (self.ages == age)[:, None]
            count = float(mask.sum())
            logprobs = self.current_logprobs, self.behavior_logprobs, mask
            ess = weight_metrics(*logprobs, cap=math.inf)["ess_fraction"]
            losses += -math.log(max(ess, sys.float_info.min)) * count
            steps += age * count
        return losses / steps if steps else None

    def sequence_log_ratios(self) -> tuple[Tensor, Tensor]:
        """Returns log theta(y) - log behaviour(y) of responses, (N,), before and after training."""
        before, after = (
            ((logprobs - self.behavior_logprobs) * self.mask).sum(dim=1)
            for logprobs in (self.current_logprobs, self.new_logprobs)
        )
        return before, after


def diagnose(
    config: RunConfig, results: StepResults, window: tuple[float, float]
) -> dict[str, float]:
    """Returns how far off-policy the data of a step was, and the bound of Theorem 3.2.

    window: [c2, c3] of the step. theta is the policy at the time it trained on each update: the
    step's last update is not in it, which spares a pass over the batch. The bound is about the
    advantages of Eq. 2 of rewards in [0, 1], so there is none with another estimator, with a
    configuration whose rewards may be outside, or with rewards of a step that are.
    """
    advantage, rewards = config.advantage, results.rewards
    bound = {}
    if (
        isinstance(advantage, GroupAdvantageConfig)
        and advantage.scale == "group"
        and config.reward.is_in_unit_interval
        and bool(((rewards >= 0) & (rewards <= 1)).all())
    ):
        bound = _bound(config, results, window, advantage.eps)
    sampled = results.sampled
    mismatch = mismatch_metrics(
        results.current_logprobs, results.behavior_logprobs, sampled & results.scored[:, None]
    ) | weight_metrics(
        results.proximal_logprobs,
        results.behavior_logprobs,
        sampled,
        **config.loss.correction.weighting,
    )
    return {
        "trained_tokens": float(results.trained.sum()),
        "response_length": float(results.mask.sum(dim=1).float().mean()),
        **{f"mismatch/{name}": value for name, value in mismatch.items()},
        **results.clip_fractions(),
        **results.divergences(),
        **bound,
    }


def _bound(
    config: RunConfig, results: StepResults, window: tuple[float, float], eps: float
) -> dict[str, float]:
    """Returns the lower bound on policy improvement of Theorem 3.2, its terms and its constants.

    Groups of equal rewards have no gradient and no place in the theorem; they are left out, as are
    groups with responses of several sources, which the theorem does not know, and groups that
    theta_t has not scored.
    """
    constants = improvement_constants(config.rollout.group_size, config.reevaluate.c1, *window, eps)
    metrics = {
        f"theory/k_{source.value}": constant
        for source, constant in zip(Source, constants, strict=True)
    }
    terms_by_source: dict[str, list[ImprovementTerm]] = {}
    before, after = results.sequence_log_ratios()
    for position in sorted(set(results.positions.tolist())):
        rows = torch.nonzero(results.positions == position).flatten()
        variance = float(results.variances[rows[0]])
        if variance == 0.0 or not results.scored[rows].all():
            continue
        if len({results.sources[row] for row in rows.tolist()}) > 1:
            continue
        ratios = after[rows].exp().clamp(max=MAX_SEQUENCE_RATIO)
        terms_by_source.setdefault(results.sources[int(rows[0])], []).append(
            ImprovementTerm(
                surrogate=float((ratios * results.advantages[rows]).mean()),
                constant=stability_constant(variance, eps),
                tv_new=total_variation_estimate(after[rows].tolist()),
                tv_old=total_variation_estimate(before[rows].tolist()),
            )
        )
    for source, terms in terms_by_source.items():
        metrics[f"theory/tv_{source}"] = sum(term.tv_new for term in terms) / len(terms)
        metrics[f"theory/bound_{source}"] = policy_improvement_bound(terms)
    all_terms = [term for terms in terms_by_source.values() for term in terms]
    return metrics | ({"theory/bound": policy_improvement_bound(all_terms)} if all_terms else {})
