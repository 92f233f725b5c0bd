"""The kinds of `loss.objective`, a section each, and what each requires.

The objectives themselves are in `bapo_core.objectives`, which imports torch; this module does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bapo_core.config.base import Kinds, Section


class PpoConfig(Section):
    """The clipped surrogate of Eq. 3 (PPO, arXiv 1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float | None = Field(0.2, gt=0.0)
    """Distance of the lower clip bound from the centre (released script: 0.2); null sets no
    bound."""
    clip_high: float | None = Field(0.28, gt=0.0)
    """Distance of the upper clip bound from the centre (released script: 0.28); null sets no
    bound."""
    dual_clip: float | None = Field(10.0, gt=1.0)
    """Dual clip: the loss of a token with a negative advantage A is at most this times |A|; null
    turns it off (released script: 10)."""
    clip_center: Literal["one", "current"] = "one"
    """Centre of the clip range under `loss.correction: behavior`: 1, or theta_t / behaviour
    (delayed GRPO)."""


class GspoConfig(Section):
    """Sequence ratios (GSPO, arXiv 2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0.0)
    """Distance of the lower clip bound of the sequence ratio from 1 (paper: 3e-4)."""
    clip_high: float = Field(4e-4, gt=0.0)
    """Distance of the upper clip bound of the sequence ratio from 1 (paper: 4e-4)."""


class CispoConfig(Section):
    """Clipped weights of gradients (CISPO, arXiv 2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, gt=0.0)
    """Distance of the lower bound of a token's weight from 1; null sets no lower bound (paper)."""
    clip_high: float = Field(0.2, gt=0.0)
    """Distance of the upper bound of a token's weight from 1 (verl: 0.2; ScaleRL and TRL: 4, so
    that weights are at most 5). The paper tunes it and gives no value."""


class SapoConfig(Section):
    """A soft gate in place of the clip (SAPO, arXiv 2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    positive_temperature: float = Field(1.0, gt=0.0)
    """Steepness tau of the gate of tokens with a positive advantage (paper: 1.0)."""
    negative_temperature: float = Field(1.05, gt=0.0)
    """Steepness tau of the gate of the other tokens (paper: 1.05)."""


class GmpoConfig(Section):
    """Geometric means of ratios (GMPO, arXiv 2507.20673)."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, gt=0.0)
    """Largest fall of a token's log-ratio, in nats, that counts where the advantage is negative
    (paper: 0.4)."""
    clip_high: float = Field(0.4, gt=0.0)
    """Largest rise of a token's log-ratio, in nats, that counts where the advantage is positive
    (paper: 0.4)."""


class ToprConfig(Section):
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286)."""

    kind: Literal["topr"] = "topr"
    level: Literal["sequence", "token"] = "sequence"
    """Ratio that is truncated at 1 where the advantage is negative: of the whole response (paper)
    or of the token (ROLL)."""


class M2poConfig(Section):
    """A bound on the second moment of the log-ratio (M2PO, arXiv 2510.01161)."""

    kind: Literal["m2po"] = "m2po"
    budget: float = Field(0.04, gt=0.0)
    """Bound of the second moment of the log-ratio, in nats squared (paper: 0.04)."""
    rule: Literal["mask", "clip"] = "mask"
    """How the bound is kept: `mask` drops the tokens with the largest log-ratios (paper, AReaL);
    `clip` clips ratios as PPO does, at bounds that the tokens that a clip can cut off determine
    (authors' code)."""
    min_clip_low: float = Field(0.3, gt=0.0, lt=1.0)
    """Under `rule: clip`, smallest distance of the lower bound from 1 (authors' code: 0.3)."""
    min_clip_high: float = Field(0.5, gt=0.0)
    """Under `rule: clip`, smallest distance of the upper bound from 1 (authors' code: 0.5)."""


class ClipCovConfig(Section):
    """Tokens of high covariance without gradient (Clip-Cov, arXiv 2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(0.2, gt=0.0)
    """Distance of PPO's lower clip bound from 1 (authors' code: 0.2)."""
    clip_high: float = Field(0.2, gt=0.0)
    """Distance of PPO's upper clip bound from 1 (authors' code: 0.2)."""
    fraction: float = Field(2e-4, gt=0.0, lt=1.0)
    """Share of the update's tokens whose gradient is cut off (paper: 2e-4)."""
    covariances: tuple[float, float] = (1.0, 5.0)
    """Range of the covariances of the tokens that are drawn at random (authors' code: 1, 5)."""

    @model_validator(mode="after")
    def _ordered(self) -> ClipCovConfig:
        low, high = self.covariances
        if low >= high:
            raise ValueError(f"covariances is [{low:g}, {high:g}]: write the lower bound first")
        return self


class KlCovConfig(Section):
    """A KL penalty on tokens of high covariance (KL-Cov, arXiv 2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(2e-4, gt=0.0, lt=1.0)
    """Share of the update's tokens that are penalised, from the largest covariance on (authors'
    code: 2e-4)."""
    coefficient: float = Field(1.0, gt=0.0)
    """beta, the coefficient of the penalty (authors' code: 1)."""
    penalty: Literal["kl", "abs"] = "kl"
    """Estimate of the divergence: `kl` is r - log r - 1, unbiased for the KL from the proximal
    policy; `abs` is |log r| (authors' code), whose gradient has the same size however close
    the policies are, and where they agree a sign that rounding determines."""


class AdaptiveClippingConfig(Section):
    """Clip bounds that each update searches (the other BAPO, arXiv 2510.18927)."""

    kind: Literal["adaptive_clipping"] = "adaptive_clipping"
    target: float = Field(0.4, gt=0.0)
    """rho_0, the contribution of tokens with positive advantages at which the search of the bounds
    stops (paper: 0.4; Llama 0.45)."""
    low_range: tuple[float, float] = (0.6, 0.9)
    """[a-, b-], the first and the last lower bound of the ratio (paper: 0.6, 0.9)."""
    high_range: tuple[float, float] = (1.2, 3.0)
    """[a+, b+], the first and the last upper bound of the ratio (paper: 1.2, 3)."""
    low_step: float = Field(0.02, gt=0.0)
    """delta_2, the step of the lower bound (paper: 0.02)."""
    high_step: float = Field(0.05, gt=0.0)
    """delta_1, the step of the upper bound (paper: 0.05)."""
    contribution: Literal["gradient", "share", "literal", "ratio"] = "gradient"
    """Measure that the search compares with the target. With P and N, the sums of tokens with
    positive and negative advantages: `gradient` is P / (P + N) over tokens that the bounds leave a
    gradient (Eq. 5); `share` is the same of the clipped loss (Eq. 8, with absolute values of
    tokens); `literal` is P / |P - N| of it (Eq. 8, with the absolute value of the sum); `ratio` is
    P / N of it (authors' code, whose targets are ratios, too)."""
    token_weight: Literal["rollout", "none"] = "rollout"
    """Weight of a token in P and N: its probability under the rollout policy (paper), or 1
    (authors' code)."""
    order: Literal["upper_first", "lower_first"] = "upper_first"
    """Bound that is moved first, up to its last value (paper: upper; authors' code: lower)."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Dual clip, as in PPO; null turns it off (authors' code: 3)."""

    @model_validator(mode="after")
    def _ordered(self) -> AdaptiveClippingConfig:
        for key, (start, end) in (("low_range", self.low_range), ("high_range", self.high_range)):
            if start > end:
                raise ValueError(f"{key} is [{start:g}, {end:g}]: write the lower bound first")
        if not 0.0 < self.low_range[1] <= 1.0 <= self.high_range[0]:
            raise ValueError(
                f"low_range ends at {self.low_range[1]:g} and high_range starts at "
                f"{self.high_range[0]:g}, which are bounds of the ratio and not distances from 1; "
                "set low_range to at most 1 and high_range to at least 1, for example [0.6, 0.9] "
                "and [1.2, 3.0]"
            )
        return self


OBJECTIVE_ENTRY_POINTS = "bapo.objectives"
"""The group of entry points of objectives: name -> `bapo_core.objectives.Objective` or a loss."""
_Objective = (
    PpoConfig
    | GspoConfig
    | CispoConfig
    | SapoConfig
    | GmpoConfig
    | ToprConfig
    | M2poConfig
    | ClipCovConfig
    | KlCovConfig
    | AdaptiveClippingConfig
)
OBJECTIVE_KINDS = Kinds(_Objective, plug_ins=OBJECTIVE_ENTRY_POINTS)
"""The kinds of `loss.objective`."""
ObjectiveConfig = Annotated[_Objective, OBJECTIVE_KINDS]
"""A section `loss.objective`; one of a plug-in has a model of its own."""
SEQUENCE_OBJECTIVES = frozenset({"gspo", "gmpo"})
"""Objectives with one ratio for a response, so with one advantage and one weight."""
BEHAVIOR_OBJECTIVES = frozenset({"topr", "m2po", "adaptive_clipping"})
"""Objectives whose equations have the ratio to the policy that sampled the tokens."""
