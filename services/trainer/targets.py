"""Targets of a step's loss, and the results of each token that was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapo_core.config.loss import LossConfig
from bapo_core.importance import truncated_weights
from services.trainer.data import Batch


class ValueTargets(NamedTuple):
    """Constants of the critic's loss, (N, R) each."""

    old_values: Tensor
    """The critic's values before the step's first update."""
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """Constants of a step's loss (Eq. 3), (N, R) each where nothing else is noted.

    What depends on theta_t, the policy before the step's first update, follows from
    `current_logprobs`. Rows that no pass has scored yet have NaN there (`scored`), until their own
    forward pass in the step's first update.
    """

    loss: LossConfig
    valid: Tensor
    """Tokens of the responses."""
    mask: Tensor
    """Tokens that have a loss: those of all responses, or only of complete ones."""
    advantages: Tensor
    behavior_logprobs: Tensor
    current_logprobs: Tensor
    """Log-probs under theta_t."""
    scored: Tensor
    """(N, 1) bool: whether `current_logprobs` are known."""
    demonstrated: Tensor
    """(N, 1) bool: whether the response is a demonstration, which no policy sampled."""
    replayed: Tensor
    """(N, 1) bool: whether the response is a replayed one."""
    storage_logprobs: Tensor | None = None
    """Log-probs of the trainer at the storage step; NaN where none are recorded."""
    initial_logprobs: Tensor | None = None
    """Log-probs under the reference policy, if the KL is to one."""
    reference_share: float = 1.0
    """Share of the KL to the reference; the rest is to theta_t."""
    weight_mean: float = 1.0
    """Mean that `loss.correction.weight_norm` divides the importance weights by."""
    old_values: Tensor | None = None
    """`ValueTargets.old_values`; None without a critic."""
    returns: Tensor | None = None
    """`ValueTargets.returns`; None without a critic."""

    @property
    def values(self) -> ValueTargets | None:
        """Targets of the critic; None without one."""
        if self.old_values is None or self.returns is None:
            return None
        return ValueTargets(self.old_values, self.returns)

    @property
    def proximal_logprobs(self) -> Tensor:
        """Log-probs in the denominator of the PPO ratio, by `loss.correction`."""
        match self.loss.correction.kind:
            case "prox_current":
                return self.current_logprobs
            case "behavior":
                return self.behavior_logprobs
            case "decoupled":
                if self.storage_logprobs is None:
                    return self.current_logprobs
                return torch.where(self.replayed, self.storage_logprobs, self.current_logprobs)

    @property
    def weights(self) -> Tensor:
        """Importance weights: proximal over behaviour, within bounds; 1 under the correction
        `behavior`."""
        correction = self.loss.correction
        if correction.kind == "behavior":
            return self.valid.float()
        weights = truncated_weights(
            self.proximal_logprobs, self.behavior_logprobs, self.valid, **correction.weighting
        )
        return weights if self.weight_mean == 1.0 else weights / self.weight_mean

    @property
    def reference_logprobs(self) -> Tensor:
        """Log-probs of the policy that the KL is taken to.

        A demonstration has no behaviour policy to stay close to, and theta_t in its place.
        """
        if self.initial_logprobs is not None:
            return self.initial_logprobs
        return torch.where(self.demonstrated, self.current_logprobs, self.behavior_logprobs)

    @property
    def clip_center(self) -> Tensor | None:
        """Centre of the clip range, where it is not 1."""
        if not self.loss.moves_center:
            return None
        return (self.current_logprobs - self.behavior_logprobs).exp()

    def scored_by(self, logprobs: Tensor) -> Targets:
        """Returns these targets with the log-probs of theta_t."""
        scored = torch.ones_like(self.scored)
        return replace(self, current_logprobs=logprobs, scored=scored)

    def select(self, rows: Tensor | slice) -> Targets:
        """Returns the targets of some rows."""
        return replace(self, **{name: tensor[rows] for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Any]:
        """Returns the tensors of these targets by the names of their fields."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class TokenResults:
    """Results of each token at the time it was trained on, (N, R); updates fill in their rows."""

    logprobs: Tensor
    clipped: Tensor
    """Whether the objective cut the token's gradient off, or bounded its weight."""

    @classmethod
    def empty(cls, batch: Batch) -> TokenResults:
        """Returns zeros in the shape of `batch`."""
        return cls(torch.zeros_like(batch.behavior_logprobs), torch.zeros_like(batch.mask))

    def record(
        self, rows: Tensor, logprobs: Sequence[Tensor], clipped: Sequence[Tensor], mask: Tensor
    ) -> None:
        """Fills in the results of `rows`.

        logprobs, clipped: values (K,) of the tokens of some of the rows each, in the order of
        `rows`. mask: (N, R) tokens of all rows.
        """
        for values, results in ((logprobs, self.logprobs), (clipped, self.clipped)):
            if values:
                of_rows = torch.zeros(mask[rows].shape, dtype=results.dtype)
                results[rows] = of_rows.masked_scatter(
                    mask[rows], torch.cat(list(values)).to(results.dtype)
                )
