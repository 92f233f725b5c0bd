"""The sections of the policy update: the policy loss and the KL penalty."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bapo_core.config.base import Kinds, Section, UnitInterval
from bapo_core.config.objectives import (
    BEHAVIOR_OBJECTIVES,
    SEQUENCE_OBJECTIVES,
    ObjectiveConfig,
    PpoConfig,
)


class SourceLossConfig(Section):
    """The policy loss of the responses of one source, where it differs from the other sources'."""

    coefficient: float = Field(1.0, ge=0.0)
    """Factor of the policy loss."""
    clip_low: float | None = Field(None, gt=0.0)
    """In place of `loss.objective.clip_low`; null is the same."""
    clip_high: float | None = Field(None, gt=0.0)
    """In place of `loss.objective.clip_high`; null is the same."""
    shaping: float | None = Field(None, gt=0.0)
    """gamma of the shaped ratio r / (r + gamma), in place of the objective (LUFFY and ExGRPO: 0.1);
    null keeps the objective."""

    @model_validator(mode="after")
    def _shaped_has_no_clip(self) -> SourceLossConfig:
        if self.shaping is not None and (self.clip_low or self.clip_high):
            raise ValueError(
                "shaping is given with a clip bound, but the shaped ratio is not clipped; remove "
                "shaping, or clip_low and clip_high"
            )
        return self


class _Weighted(Section):
    """A correction by importance weights."""

    weight_cap: float = Field(3.0, gt=0.0)
    """Largest importance weight (released script: 3)."""
    weight_floor: float = Field(0.0, ge=0.0)
    """Smallest importance weight; 0 sets no floor (IcePop: 0.5)."""
    weight_mode: Literal["truncate", "mask", "unit"] = "truncate"
    """Treatment of importance weights outside of [weight_floor, weight_cap]: `truncate` moves them
    to the bound (released script); `mask` sets them to 0, so that those tokens have no policy
    loss (IcePop, with 0.5 and 2). `unit` makes all weights 1, as if theta_t had sampled every
    response (ARPO), which is biased."""
    weight_norm: Literal["none", "batch"] = "none"
    """Normaliser of importance weights: `batch` divides them by their mean over the tokens of the
    batch that have a loss, so that it is 1 (verl's rollout correction)."""
    weight_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of importance weights: a token's ratio, the product over the response, or its geometric
    mean (released script: token)."""

    @property
    def weighting(self) -> dict[str, Any]:
        """The arguments of `bapo_core.importance` that importance weights depend on."""
        return {
            "cap": self.weight_cap,
            "floor": self.weight_floor,
            "mode": self.weight_mode,
            "level": self.weight_level,
        }

    @model_validator(mode="after")
    def _weights_are_bounded(self) -> Self:
        if self.weight_floor >= self.weight_cap:
            raise ValueError(
                f"weight_floor ({self.weight_floor:g}) is not below weight_cap "
                f"({self.weight_cap:g}), so no importance weight is between them; lower "
                "weight_floor or raise weight_cap"
            )
        return self


class ProxCurrentConfig(_Weighted):
    """PPO ratio theta / theta_t with the importance weight theta_t / behaviour, for every
    source."""

    kind: Literal["prox_current"] = "prox_current"


class BehaviorConfig(Section):
    """PPO ratio theta / behaviour (Eq. 3), which needs no importance weights."""

    kind: Literal["behavior"] = "behavior"

    @property
    def weighting(self) -> dict[str, Any]:
        """The arguments of `bapo_core.importance`: its defaults, as all weights are 1."""
        return {}


class DecoupledConfig(_Weighted):
    """As `prox_current`, but the proximal policy of a replayed group (X3) is the trainer's policy
    at the step in which the group was rolled out, instead of theta_t (authors' code)."""

    kind: Literal["decoupled"] = "decoupled"


_Correction = ProxCurrentConfig | BehaviorConfig | DecoupledConfig
CorrectionConfig = Annotated[_Correction, Kinds(_Correction)]
"""A section `loss.correction`."""


class LossConfig(Section):
    """The policy loss (Eq. 3): ratios, clipping, importance weights and normalisation."""

    objective: ObjectiveConfig = PpoConfig()
    """Policy loss of a token (docs/methods.md): a built-in kind, or one that an installed package
    adds."""
    correction: CorrectionConfig = ProxCurrentConfig()
    """Off-policy correction: which policy the PPO ratio has in the denominator, and what then
    weighs stale data."""
    by_source: dict[
        Literal["fresh", "reevaluated", "replayed", "demonstrated"], SourceLossConfig
    ] = Field(default_factory=dict)
    """Settings of single sources, for example `{replayed: {coefficient: 0.5}}`."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation of token losses (docs/methods.md): the mean over tokens (released script), or
    over responses of their mean over tokens (Eq. 1), of their sum, or of their sum divided by
    `rollout.max_response_tokens` (Dr. GRPO)."""
    mask_truncated: bool = False
    """Whether responses that were cut off at `rollout.max_response_tokens` have no loss (overlong
    filtering, arXiv 2503.14476); their rewards count for the advantages of their group."""
    minibatch_norm: Literal["actual", "nominal"] = "nominal"
    """Normaliser of a last minibatch that is short: `optimizer.minibatch_prompts` (`nominal`, as in
    the authors' code), so that all groups of a batch weigh the same; or its own size (`actual`),
    with which one left-over group weighs as much as a full minibatch."""
    entropy_coefficient: float = Field(0.001, ge=0.0)
    """Coefficient of the entropy bonus (Table 3: 0.001)."""

    @property
    def moves_center(self) -> bool:
        """Whether the clip range is around theta_t / behaviour instead of 1."""
        return isinstance(self.objective, PpoConfig) and self.objective.clip_center == "current"

    @model_validator(mode="after")
    def _objective_fits_the_ratio(self) -> LossConfig:
        kind, correction = self.objective.kind, self.correction
        if correction.kind == "behavior":
            return self
        if kind in BEHAVIOR_OBJECTIVES:
            raise ValueError(
                f"objective is '{kind}' but correction is '{correction.kind}': its equation has "
                "the ratio of the current to the behaviour policy, which sampled the tokens; set "
                "correction to behavior"
            )
        if kind in SEQUENCE_OBJECTIVES and correction.weight_level == "token":
            raise ValueError(
                f"objective is '{kind}' but correction.weight_level is 'token': a response has one "
                "ratio and needs one importance weight; set correction.weight_level to geometric "
                "or sequence, or correction to behavior"
            )
        if self.moves_center:
            raise ValueError(
                f"objective.clip_center is 'current' but correction is '{correction.kind}': only "
                "the ratio to the behaviour policy has a centre that moves; set correction to "
                "behavior or objective.clip_center to one"
            )
        return self

    @model_validator(mode="after")
    def _sources_fit_the_objective(self) -> LossConfig:
        for source, settings in self.by_source.items():
            if settings.shaping is not None and self.correction.kind != "behavior":
                raise ValueError(
                    f"by_source.{source}.shaping is given but correction is "
                    f"'{self.correction.kind}': the shaped ratio is the ratio of the current to "
                    "the behaviour policy; set correction to behavior"
                )
            kind = self.objective.kind
            if (settings.clip_low or settings.clip_high) and kind != "ppo":
                raise ValueError(
                    f"by_source.{source} has a clip bound but objective is '{kind}', which does "
                    "not read it; set objective to ppo, or remove the bound"
                )
        return self


class ConvexKLConfig(Section):
    """The KL-convex penalty of ReMix (arXiv 2507.06892): beta (lambda KL(pi || reference) +
    (1 - lambda) KL(pi || theta_t)), where lambda falls stepwise from 1."""

    after: int = Field(50, ge=0)
    """Last step with lambda = 1 (ReMix: 50)."""
    every: int = Field(10, ge=1)
    """Steps between two decreases of lambda (ReMix: 10)."""
    decrease: float = Field(0.1, gt=0.0, le=1.0)
    """Size of a decrease of lambda (ReMix: 0.1)."""
    lowest: UnitInterval = 0.5
    """Lowest lambda (ReMix: 0.5)."""


class KLConfig(Section):
    """The KL penalty of the loss (beta KL in Eq. 3)."""

    coefficient: float = Field(0.001, ge=0.0)
    """beta, the coefficient of the KL penalty in Eq. 3 (Table 3: 0.001); 0 turns it off."""
    placement: Literal["loss", "reward"] = "loss"
    """Where the KL penalty acts: as a term of the loss (Eq. 3), or subtracted from the reward of
    each token before advantages are estimated, as beta (log theta_t - log reference)
    (REINFORCE++)."""
    reference: Literal["rollout", "initial"] = "rollout"
    """Policy that the KL penalty is taken to: the behaviour policy of each group (alpha in Eq. 3),
    or the initial model (Eq. 1, GRPO)."""
    estimator: Literal["k1", "k2", "k3", "k3_corrected", "iw"] = "k3"
    """Estimator of the KL divergence. k1 and k3 are unbiased for samples of the current policy;
    with w = current / behaviour policy, `k3_corrected` = w k3 and `iw` = w k1 - w + 1 are unbiased
    for stored samples, too."""

    convex: ConvexKLConfig | None = None
    """Schedule of a KL penalty that is in part to theta_t (ReMix), for example `{}` with its
    defaults; null takes it to the reference alone."""
    reset_after: int | None = Field(None, ge=1)
    """Step after which the policy becomes the reference, in place of the initial model (ReMix's
    policy reincarnation, 50); null keeps the initial model."""

    def reference_share(self, step: int) -> float:
        """Returns lambda, the share of the penalty that is to the reference, at a step."""
        if self.convex is None:
            return 1.0
        settings = self.convex
        decreases = -(-max(step - settings.after, 0) // settings.every)
        return max(1.0 - settings.decrease * decreases, settings.lowest)

    def resets_before(self, step: int) -> bool:
        """Whether the reference was replaced at or before the beginning of `step`."""
        return self.reset_after is not None and step > self.reset_after

    @model_validator(mode="after")
    def _has_an_initial_reference(self) -> KLConfig:
        for key in ("convex", "reset_after"):
            if getattr(self, key) is not None and (
                self.reference != "initial" or self.coefficient == 0
            ):
                raise ValueError(
                    f"{key} is given with reference '{self.reference}' and coefficient "
                    f"{self.coefficient:g}, but it needs a KL penalty to the initial model; set "
                    f"reference to initial and a coefficient above 0, or remove {key}"
                )
        if self.convex is not None and self.placement == "reward":
            raise ValueError(
                "convex is given but placement is 'reward': the KL to theta_t is 0 when rewards "
                "are computed; set placement to loss, or remove convex"
            )
        return self
