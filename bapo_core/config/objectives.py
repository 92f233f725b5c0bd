"""The settings of the objectives of `loss.objective`, a section each, and what each requires.

The objectives themselves are in `bapo_core.objectives`, which imports torch; this module does not.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bapo_core.config.base import Section


class GspoConfig(Section):
    """Settings of `loss.objective: gspo` (arXiv 2507.18071), with sequence ratios."""

    clip_low: float = Field(3e-4, gt=0.0)
    """Distance of the lower clip bound of the sequence ratio from 1 (paper: 3e-4)."""
    clip_high: float = Field(4e-4, gt=0.0)
    """Distance of the upper clip bound of the sequence ratio from 1 (paper: 4e-4)."""


class CispoConfig(Section):
    """Settings of `loss.objective: cispo` (arXiv 2506.13585), which clips weights of gradients."""

    clip_low: float | None = Field(None, gt=0.0)
    """Distance of the lower bound of a token's weight from 1; null sets no lower bound (paper)."""
    clip_high: float = Field(0.2, gt=0.0)
    """Distance of the upper bound of a token's weight from 1 (verl: 0.2; ScaleRL and TRL: 4, so
    that weights are at most 5). The paper tunes it and gives no value."""


class SapoConfig(Section):
    """Settings of `loss.objective: sapo` (arXiv 2511.20347), with a soft gate for a clip."""

    positive_temperature: float = Field(1.0, gt=0.0)
    """Steepness tau of the gate of tokens with a positive advantage (paper: 1.0)."""
    negative_temperature: float = Field(1.05, gt=0.0)
    """Steepness tau of the gate of the other tokens (paper: 1.05)."""


class GmpoConfig(Section):
    """Settings of `loss.objective: gmpo` (arXiv 2507.20673), with geometric means of ratios."""

    clip_low: float = Field(0.4, gt=0.0)
    """Largest fall of a token's log-ratio, in nats, that counts where the advantage is negative
    (paper: 0.4)."""
    clip_high: float = Field(0.4, gt=0.0)
    """Largest rise of a token's log-ratio, in nats, that counts where the advantage is positive
    (paper: 0.4)."""


class ToprConfig(Section):
    """Settings of `loss.objective: topr` (arXiv 2503.14286), tapered off-policy REINFORCE."""

    level: Literal["sequence", "token"] = "sequence"
    """Ratio that is truncated at 1 where the advantage is negative: of the whole response (paper)
    or of the token (ROLL)."""


class M2poConfig(Section):
    """Settings of `loss.objective: m2po` (arXiv 2510.01161), which bounds a second moment."""

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
    """Settings of `loss.objective: clip_cov` (arXiv 2505.22617): tokens without gradient."""

    clip_low: float = Field(0.2, gt=0.0)
    """Distance of PPO's lower clip bound from 1 (authors' code: 0.2)."""
    clip_high: float = Field(0.2, gt=0.0)
    """Distance of PPO's upper clip bound from 1 (authors' code: 0.2)."""
    fraction: float = Field(2e-4, gt=0.0, lt=1.0)
    """Share of the update's tokens whose gradient is cut off (paper: 2e-4)."""
    covariances: tuple[float, float] = (1.0, 5.0)
    """Covariances between which those tokens are drawn at random (authors' code: 1, 5)."""

    @model_validator(mode="after")
    def _ordered(self) -> ClipCovConfig:
        low, high = self.covariances
        if low >= high:
            raise ValueError(f"covariances is [{low:g}, {high:g}]: write the lower bound first")
        return self


class KlCovConfig(Section):
    """Settings of `loss.objective: kl_cov` (arXiv 2505.22617): tokens with a KL penalty."""

    fraction: float = Field(2e-4, gt=0.0, lt=1.0)
    """Share of the update's tokens that are penalised: those of the largest covariance (authors'
    code: 2e-4)."""
    coefficient: float = Field(1.0, gt=0.0)
    """beta, the coefficient of the penalty (authors' code: 1)."""
    penalty: Literal["kl", "abs"] = "kl"
    """Estimate of the divergence: `kl` is r - log r - 1, unbiased for the KL from the proximal
    policy; `abs` is |log r| (authors' code), whose gradient has the same size however close
    the policies are, and where they agree a sign that rounding determines."""


class AdaptiveClippingConfig(Section):
    """Settings of `loss.objective: adaptive_clipping` (arXiv 2510.18927): bounds of each update."""

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
    """Dual clip as in `loss.dual_clip`; null turns it off (authors' code: 3)."""

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


OBJECTIVE_SECTIONS: dict[str, type[Section]] = {
    "gspo": GspoConfig,
    "cispo": CispoConfig,
    "sapo": SapoConfig,
    "gmpo": GmpoConfig,
    "topr": ToprConfig,
    "m2po": M2poConfig,
    "clip_cov": ClipCovConfig,
    "kl_cov": KlCovConfig,
    "adaptive_clipping": AdaptiveClippingConfig,
}
"""Name of an objective -> its settings, which are the section of `loss` of the same name."""
OBJECTIVE_NAMES = ("ppo", *OBJECTIVE_SECTIONS)
"""The built-in objectives; `ppo` has its settings in `loss` itself."""
OBJECTIVE_ENTRY_POINTS = "bapo.objectives"
"""The group of entry points of objectives: name -> `bapo_core.objectives.Objective` or a loss."""
SEQUENCE_OBJECTIVES = frozenset({"gspo", "gmpo"})
"""Objectives with one ratio for a response, so with one advantage and one weight."""
BEHAVIOR_OBJECTIVES = frozenset({"topr", "m2po", "adaptive_clipping"})
"""Objectives whose equations have the ratio to the policy that sampled the tokens."""
ESTIMATOR_NAMES = (
    "group",
    "gae",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "maxrl",
)
"""The built-in estimators of advantages."""
ESTIMATOR_ENTRY_POINTS = "bapo.estimators"
"""The group of entry points of estimators: name -> `bapo_core.advantages.Estimator`."""
