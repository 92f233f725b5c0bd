"""Objectives are the policy losses that `loss.objective` selects, by token and to be minimised.

An objective is a function of the tokens, its settings and the statistics of the whole update. In
the equations r = pi_theta / pi_prox is the ratio of a token, whose denominator `loss.correction`
sets, A its advantage, w its importance weight, y its response, and sg stops gradients. Log-probs
are natural logarithms. Values at masked positions have no influence, NaN and infinity included.

Other distributions add objectives by the entry-point group `bapo.objectives`, which names an
`Objective` or, for one without statistics, its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapo_core.clipping import search_bounds
from bapo_core.config.loss import LossConfig, SourceLossConfig
from bapo_core.config.objectives import (
    OBJECTIVE_ENTRY_POINTS,
    AdaptiveClippingConfig,
    CispoConfig,
    ClipCovConfig,
    GmpoConfig,
    GspoConfig,
    KlCovConfig,
    M2poConfig,
    PpoConfig,
    SapoConfig,
    ToprConfig,
)
from bapo_core.errors import ConfigError
from bapo_core.losses import clipped_surrogate, clipped_tokens, sequence_ratio
from bapo_core.numerics import MAX_LOG_RATIO
from bapo_core.plug_ins import find

__all__ = [
    "OBJECTIVES",
    "Objective",
    "TokenLosses",
    "Tokens",
    "get_objective",
    "losses_by_source",
    "shaped",
]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The inputs of a loss, (N, T) each; statistics get the valid tokens of an update, (T,).

    Only `logprobs` has a gradient.
    """

    logprobs: Tensor
    proximal_logprobs: Tensor
    """Log-probs in the denominator of the ratio, by `loss.correction`."""
    advantages: Tensor
    mask: Tensor
    """True, or 1, at valid tokens."""
    weights: Tensor
    """Importance weights w."""
    clip_center: Tensor | None = None
    """Centre of the clip range, where it is not 1."""
    pre_update_logprobs: Tensor | None = None
    """Log-probs just before the update, for objectives with statistics, which decide by them."""
    uniforms: Tensor | None = None
    """Uniform random numbers in [0, 1), for objectives with `Objective.needs_uniforms`."""

    @property
    def valid(self) -> Tensor:
        """The bool mask of the valid tokens."""
        return self.mask.bool()

    @property
    def weighted_advantages(self) -> Tensor:
        """The weighted advantages w A; 0 where masked."""
        return torch.where(self.valid, self.weights * self.advantages, 0.0)

    @property
    def log_ratios(self) -> Tensor:
        """The log-ratios log r, clamped to +/-`MAX_LOG_RATIO`; 0 where masked."""
        difference = torch.where(self.valid, self.logprobs - self.proximal_logprobs, 0.0)
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def valid_logprobs(self) -> Tensor:
        """The log-probs, with 0 where masked."""
        return torch.where(self.valid, self.logprobs, 0.0)

    @property
    def before_update(self) -> Tokens:
        """The same tokens under the policy just before this update."""
        if self.pre_update_logprobs is None:
            raise ValueError(
                "pre_update_logprobs is None; give the objective a function `statistics`"
            )
        return replace(self, logprobs=self.pre_update_logprobs)


class TokenLosses(NamedTuple):
    """An objective's result, (N, T) each; 0 and false where masked."""

    losses: Tensor
    clipped: Tensor
    """Bool, whether the objective cut the token's gradient off, or bounded its weight."""


Statistics = Mapping[str, float]
"""Numbers of a whole update, over all its micro-batches and ranks, by the name of their metric."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective: its loss, and what that needs of the whole update."""

    loss: Callable[[Tokens, Any, Statistics], TokenLosses]
    """Function of the tokens of a micro-batch, of whole responses, the objective's settings and the
    statistics."""
    statistics: Callable[[Tokens, Any], dict[str, float]] | None = None
    """Function of all tokens of the update, (T,), and the settings; an update whose objective has
    one takes one more forward pass."""
    needs_uniforms: bool = False
    """Whether the objective draws tokens at random."""


def ppo(tokens: Tokens, settings: PpoConfig, statistics: Statistics) -> TokenLosses:
    """Clips the ratio of each token (PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729).

        loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Where A < 0, it is at most -w dual_clip A. The centre 1 may move. The defaults are those of
    BAPO's released script. A bound that is null does not clip.
    """
    return _clip(
        tokens,
        settings.clip_low,
        settings.clip_high,
        settings.dual_clip,
        clip_center=tokens.clip_center,
    )


def gspo(tokens: Tokens, settings: GspoConfig, statistics: Statistics) -> TokenLosses:
    """Clips one ratio for each response (GSPO, arXiv 2507.18071).

        s    = exp(mean over the tokens of y of log r)
        loss = -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    All tokens of a response have the same loss, so that `seq-mean-token-mean` is the paper's mean
    over responses, and `seq-mean-token-sum` weighs them by length (LUSPO, arXiv 2602.05261). The
    bounds are 3e-4 and 4e-4 from 1. log s is at most 10, as in the authors' code.
    """
    ratio = sequence_ratio(tokens.logprobs, tokens.proximal_logprobs, tokens.mask)
    arguments = (ratio.log(), torch.zeros_like(ratio), tokens.advantages, tokens.mask)
    bounds: dict[str, Any] = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    return TokenLosses(
        clipped_surrogate(*arguments, **bounds, weights=tokens.weights),
        clipped_tokens(*arguments, **bounds),
    )


def cispo(tokens: Tokens, settings: CispoConfig, statistics: Statistics) -> TokenLosses:
    """Clips the weight of a gradient and cuts no gradient off (CISPO, arXiv 2506.13585).

        loss = -w sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta

    By default there is no lower bound (paper), and the upper one is 1.2 (verl).
    """
    ratios = tokens.log_ratios.exp().detach()
    low = None if settings.clip_low is None else 1.0 - settings.clip_low
    bounded = ratios.clamp(min=low, max=1.0 + settings.clip_high)
    losses = -bounded * tokens.weighted_advantages * tokens.valid_logprobs
    return TokenLosses(losses, (bounded != ratios) & tokens.valid)


def sapo(tokens: Tokens, settings: SapoConfig, statistics: Statistics) -> TokenLosses:
    """Weighs tokens by a soft gate in place of the clip (SAPO, arXiv 2511.20347).

        loss = -w A sigmoid(tau (r - 1)) 4 / tau

    tau is 1.0 where A > 0, and 1.05 elsewhere, so that the gate closes faster there. The gradient
    with respect to r is that of -w r A at r = 1. Nothing is clipped.
    """
    ratios = tokens.log_ratios.exp()

    def gates(tau: float) -> Tensor:
        return torch.sigmoid(tau * (ratios - 1.0)) * (4.0 / tau)

    by_sign = torch.where(
        tokens.advantages > 0,
        gates(settings.positive_temperature),
        gates(settings.negative_temperature),
    )
    return TokenLosses(-tokens.weighted_advantages * by_sign, torch.zeros_like(tokens.valid))


def gmpo(tokens: Tokens, settings: GmpoConfig, statistics: Statistics) -> TokenLosses:
    """Takes the geometric mean of a response's clipped ratios (GMPO, arXiv 2507.20673).

        d    = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0
        loss = -w A exp(mean over the tokens of y of d)

    All tokens of a response have the same loss, for `seq-mean-token-mean`. The bounds are in nats,
    0.4 by default.
    """
    log_ratios = tokens.log_ratios
    good, bad = tokens.advantages > 0, tokens.advantages < 0
    clipped = (good & (log_ratios > settings.clip_high)) | (bad & (log_ratios < -settings.clip_low))
    bounded = torch.where(
        good, log_ratios.clamp(max=settings.clip_high), log_ratios.clamp(min=-settings.clip_low)
    )
    total = torch.where(tokens.valid, bounded, 0.0).sum(dim=1, keepdim=True)
    mean = total / tokens.valid.sum(dim=1, keepdim=True).clamp(min=1)
    return TokenLosses(-tokens.weighted_advantages * mean.exp(), clipped & tokens.valid)


def topr(tokens: Tokens, settings: ToprConfig, statistics: Statistics) -> TokenLosses:
    """Truncates the ratio of worse responses, and better ones have none (TOPR, arXiv 2503.14286).

        loss = -A log pi_theta                                     where A > 0
        loss = -sg(min(product over y of r, 1)) A log pi_theta     elsewhere

    r is the ratio to the behaviour policy, so there are no importance weights. The paper's sign is
    that of the reward less a baseline, which is the advantage. Under `level: token` (ROLL), the
    ratio is the token's own. `seq-mean-token-sum` gives the log-prob of whole responses (paper).
    """
    log_ratios = tokens.log_ratios.detach()
    if settings.level == "sequence":
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    bad = tokens.valid & (tokens.advantages <= 0)
    tapers = torch.where(bad, log_ratios.clamp(-MAX_LOG_RATIO, 0.0).exp(), 1.0)
    advantages = torch.where(tokens.valid, tokens.advantages, 0.0)
    return TokenLosses(-tapers * advantages * tokens.valid_logprobs, bad & (log_ratios > 0))


def m2po(tokens: Tokens, settings: M2poConfig, statistics: Statistics) -> TokenLosses:
    """Bounds the second moment of the log-ratio over the update (M2PO, arXiv 2510.01161).

        loss = -r A if (log r)^2 <= threshold, else 0

    The threshold is the largest at which the mean of (log r)^2 over the tokens that are kept is
    below `budget` (0.04); at least one is kept. r is the ratio to the behaviour policy, so there
    are no importance weights. Which tokens are kept is decided before the update.

    Under `rule: clip` (authors' code), the loss is PPO's, with the bounds exp(-tau) and exp(tau),
    at least 0.3 and 0.5 from 1. tau is the largest at which the mean of min(|log r|, tau)^2 is
    within the budget, over the tokens that a clip can cut off: r > 1 where A > 0, r < 1 where
    A < 0. It lies between two log-ratios of the update; the authors' code takes the lower one.
    """
    if settings.rule == "clip":
        return _clip(tokens, 1.0 - statistics["m2po/clip_low"], statistics["m2po/clip_high"] - 1.0)
    kept = tokens.before_update.log_ratios.square() <= statistics["m2po/threshold"]
    losses = -tokens.log_ratios.exp() * tokens.weighted_advantages
    return TokenLosses(torch.where(kept, losses, 0.0), tokens.valid & ~kept)


def second_moment_statistics(tokens: Tokens, settings: M2poConfig) -> dict[str, float]:
    """Returns the threshold or the bounds of `m2po`, and the mean of (log r)^2 over all tokens."""
    log_ratios = tokens.before_update.log_ratios.double()
    squares = log_ratios.square()
    moment = {"m2po/second_moment": float(squares.mean())}
    if settings.rule == "mask":
        ordered = squares.sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
        kept = max(int((means < settings.budget).sum()), 1)
        # The threshold has the precision of the log-ratios that the loss compares with it.
        threshold = tokens.before_update.log_ratios.square().sort().values[kept - 1]
        return {**moment, "m2po/threshold": float(threshold)}
    cut = ((tokens.advantages > 0) & (log_ratios > 0)) | (
        (tokens.advantages < 0) & (log_ratios < 0)
    )
    tau = _largest_cap(squares[cut], settings.budget) ** 0.5
    low, high = torch.tensor([-tau, tau], dtype=torch.float64).exp().tolist()
    return {
        **moment,
        "m2po/clip_low": min(low, 1.0 - settings.min_clip_low),
        "m2po/clip_high": max(high, 1.0 + settings.min_clip_high),
    }


def _largest_cap(values: Tensor, budget: float) -> float:
    """Returns the largest c at which the mean of min(value, c) is at most `budget`.

    If the mean of the values themselves is, the result is `MAX_LOG_RATIO` squared, which caps none.
    """
    ordered = values.sort().values
    if float(ordered.sum()) <= budget * len(ordered):
        return MAX_LOG_RATIO**2
    # If the k smallest stay as they are and the others are capped, the sum is linear in c.
    below = torch.cat([torch.zeros(1, dtype=ordered.dtype), ordered.cumsum(0)[:-1]])
    others = torch.arange(len(ordered), 0, -1)
    caps = (budget * len(ordered) - below) / others
    first = int((caps <= ordered).nonzero()[0, 0])
    return float(caps[first])


def clip_cov(tokens: Tokens, settings: ClipCovConfig, statistics: Statistics) -> TokenLosses:
    """Cuts off the gradient of a few tokens of high covariance (Clip-Cov, arXiv 2505.22617).

        cov  = (A - mean of A) (log pi - mean of log pi), over all tokens of the update
        loss = 0 for fraction * n tokens, drawn among those with cov in (1, 5), PPO's for the others

    The log-probs of cov are those just before the update. Tokens that PPO's clip (0.2, 0.2) cuts
    off anyway are not drawn. At least one is drawn, if there is any. fraction is 2e-4.
    """
    losses, clipped = _clip(tokens, settings.clip_low, settings.clip_high)
    assert tokens.uniforms is not None  # see OBJECTIVES
    chosen = tokens.uniforms <= statistics["clip_cov/draw"]
    drawn = _candidates(tokens, settings, statistics) & chosen
    return TokenLosses(torch.where(drawn, 0.0, losses), clipped | drawn)


def clip_cov_statistics(tokens: Tokens, settings: ClipCovConfig) -> dict[str, float]:
    """Returns the means of `clip_cov`, and the largest draw of a token that is chosen."""
    means = _means("clip_cov", tokens)
    assert tokens.uniforms is not None  # see OBJECTIVES
    draws = tokens.uniforms[_candidates(tokens, settings, means)].sort().values
    count = min(max(int(settings.fraction * tokens.valid.numel()), 1), len(draws))
    return {**means, "clip_cov/draw": float(draws[count - 1]) if count else -1.0}


def _candidates(tokens: Tokens, settings: ClipCovConfig, means: Statistics) -> Tensor:
    """Returns a mask of the tokens that Clip-Cov may draw."""
    low, high = settings.covariances
    covariances = _covariances("clip_cov", tokens, means)
    clipped = _clip(tokens.before_update, settings.clip_low, settings.clip_high).clipped
    return tokens.valid & (covariances > low) & (covariances < high) & ~clipped


def kl_cov(tokens: Tokens, settings: KlCovConfig, statistics: Statistics) -> TokenLosses:
    """Adds a KL penalty to the tokens of highest covariance (KL-Cov, arXiv 2505.22617).

        cov  = (A - mean of A) (log pi - mean of log pi), over all tokens of the update
        loss = -w r A, plus beta (r - log r - 1) for the fraction * n tokens of highest cov

    The log-probs of cov are those just before the update. Of tokens of equal covariance, such as
    those of probability 1, some are drawn. There is no clip. fraction is 2e-4, and at least one
    token; beta is 1. Under `penalty: abs` (authors' code) it is beta |log r| instead.
    """
    covariances = _covariances("kl_cov", tokens, statistics)
    assert tokens.uniforms is not None  # see OBJECTIVES
    threshold = statistics["kl_cov/threshold"]
    drawn = (covariances == threshold) & (tokens.uniforms <= statistics["kl_cov/draw"])
    chosen = tokens.valid & ((covariances > threshold) | drawn)
    log_ratios = tokens.log_ratios
    ratios = log_ratios.exp()
    divergences = log_ratios.abs() if settings.penalty == "abs" else ratios - log_ratios - 1.0
    penalties = torch.where(chosen, settings.coefficient * divergences, 0.0)
    losses = -ratios * tokens.weighted_advantages + penalties
    return TokenLosses(losses, torch.zeros_like(chosen))


def kl_cov_statistics(tokens: Tokens, settings: KlCovConfig) -> dict[str, float]:
    """Returns the means of `kl_cov`, the smallest covariance of a token that is penalised, and the
    largest draw of those with this covariance."""
    means = _means("kl_cov", tokens)
    covariances = _covariances("kl_cov", tokens, means)
    count = max(int(settings.fraction * len(covariances)), 1)
    threshold = covariances.topk(count).values[-1]
    assert tokens.uniforms is not None  # see OBJECTIVES
    tied = tokens.uniforms[covariances == threshold].sort().values
    draw = tied[count - 1 - int((covariances > threshold).sum())]
    return {**means, "kl_cov/threshold": float(threshold), "kl_cov/draw": float(draw)}


def _means(family: str, tokens: Tokens) -> dict[str, float]:
    return {
        f"{family}/advantage_mean": float(tokens.advantages.double().mean()),
        f"{family}/logprob_mean": float(tokens.before_update.logprobs.double().mean()),
    }


def _covariances(family: str, tokens: Tokens, means: Statistics) -> Tensor:
    """Returns each token's part of the covariance of advantages and log-probs."""
    return (tokens.advantages - means[f"{family}/advantage_mean"]) * (
        tokens.before_update.logprobs - means[f"{family}/logprob_mean"]
    )


def adaptive_clipping(
    tokens: Tokens, settings: AdaptiveClippingConfig, statistics: Statistics
) -> TokenLosses:
    """Searches the clip bounds of each update (BAPO's adaptive clipping, arXiv 2510.18927, Eq. 8).

        loss = -min(r A, clip(r, c_low, c_high) A)

    c_low starts at 0.6 and c_high at 1.2. While the contribution rho of tokens with positive
    advantages is below the target 0.4, c_high grows by 0.05 up to 3, then c_low by 0.02 up to 0.9
    (Algorithm 1). `bapo_core.clipping.search_bounds` has the measures of rho. r is the ratio to
    the rollout policy, so there are no importance weights.
    """
    low, high = statistics["clip/low"], statistics["clip/high"]
    return _clip(tokens, 1.0 - low, high - 1.0, settings.dual_clip)


def adaptive_clipping_statistics(
    tokens: Tokens, settings: AdaptiveClippingConfig
) -> dict[str, float]:
    """Returns the bounds of `adaptive_clipping`, and the contribution within them."""
    ratios = tokens.before_update.log_ratios.exp()
    bounds = search_bounds(ratios, tokens.advantages, tokens.proximal_logprobs, settings)
    return {"clip/low": bounds.low, "clip/high": bounds.high, "clip/rho": bounds.rho}


def _clip(
    tokens: Tokens,
    low: float | None,
    high: float | None,
    dual_clip: float | None = None,
    *,
    clip_center: Tensor | None = None,
) -> TokenLosses:
    """Returns the clipped surrogate with bounds at distances `low` and `high` from the centre."""
    arguments = (tokens.logprobs, tokens.proximal_logprobs, tokens.advantages, tokens.mask)
    bounds: dict[str, Any] = {"clip_low": low, "clip_high": high, "dual_clip": dual_clip}
    return TokenLosses(
        clipped_surrogate(*arguments, **bounds, weights=tokens.weights, clip_center=clip_center),
        clipped_tokens(*arguments, **bounds, clip_center=clip_center),
    )


def shaped(tokens: Tokens, gamma: float) -> TokenLosses:
    """Shapes the ratio of off-policy responses (LUFFY, arXiv 2504.14945; ExGRPO, arXiv 2510.02245).

        loss = -w A r / (r + gamma)

    It rises most steeply at small r, so that improbable tokens are learned, and it is not clipped.
    gamma is 0.1 in both papers.
    """
    ratios = tokens.log_ratios.exp()
    losses = -tokens.weighted_advantages * ratios / (ratios + gamma)
    return TokenLosses(losses, torch.zeros_like(tokens.valid))


def losses_by_source(
    objective: Objective,
    tokens: Tokens,
    sources: Mapping[str, Tensor],
    settings: LossConfig,
    statistics: Statistics,
) -> TokenLosses:
    """Returns the losses of responses, with the settings of their sources (`loss.by_source`).

    sources: for each source, a mask (N, 1) of the rows of `tokens` that come from it. A source
    without settings has the loss's.
    """
    by_source: Mapping[str, SourceLossConfig] = {
        str(name): source_settings for name, source_settings in settings.by_source.items()
    }
    results = TokenLosses(torch.zeros_like(tokens.logprobs), torch.zeros_like(tokens.valid))
    for source, rows in sorted(sources.items()):
        source_settings = by_source.get(source, SourceLossConfig())
        # Masks instead of indexes, for which the host would wait for a GPU.
        source_tokens = replace(tokens, mask=tokens.valid & rows)
        if source_settings.shaping is not None:
            losses, clipped = shaped(source_tokens, source_settings.shaping)
        else:
            bounds = source_settings.model_dump(
                include={"clip_low", "clip_high"}, exclude_none=True
            )
            objective_settings = settings.objective.model_copy(update=bounds)
            losses, clipped = objective.loss(source_tokens, objective_settings, statistics)
        results = TokenLosses(
            torch.where(rows, source_settings.coefficient * losses, results.losses),
            results.clipped | clipped,
        )
    return results


OBJECTIVES: dict[str, Objective] = {
    "ppo": Objective(ppo),
    "gspo": Objective(gspo),
    "cispo": Objective(cispo),
    "sapo": Objective(sapo),
    "gmpo": Objective(gmpo),
    "topr": Objective(topr),
    "m2po": Objective(m2po, second_moment_statistics),
    "clip_cov": Objective(clip_cov, clip_cov_statistics, needs_uniforms=True),
    "kl_cov": Objective(kl_cov, kl_cov_statistics, needs_uniforms=True),
    "adaptive_clipping": Objective(adaptive_clipping, adaptive_clipping_statistics),
}
"""The built-in objectives, by the kind of `loss.objective`."""


def get_objective(name: str) -> Objective:
    """Returns an objective by name, which may be a plug-in's.

    Raises `ConfigError` as `find` does.
    """
    objective = find(
        name, OBJECTIVES, group=OBJECTIVE_ENTRY_POINTS, kind="objective", error=ConfigError
    )
    return objective if isinstance(objective, Objective) else Objective(objective)
