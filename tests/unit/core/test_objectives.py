"""Objectives equal direct transcriptions of their papers' equations, in values and gradients.

The transcriptions are plain Python on lists of floats, written from the papers and not from
`bapo_core.objectives`. Where an equation stops a gradient, a transcription takes the log-probs
twice: `fixed` are those that no gradient flows through. Gradients are compared with central
differences.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_core.clipping import search_bounds
from bapo_core.config import ConfigError
from bapo_core.config.loss import LossConfig
from bapo_core.config.objectives import (
    BEHAVIOR_OBJECTIVES,
    OBJECTIVE_KINDS,
    AdaptiveClippingConfig,
    PpoConfig,
)
from bapo_core.objectives import OBJECTIVES, Tokens, get_objective, losses_by_source, shaped
from docs.generate.methods import EXAMPLE, SETTINGS
from tests.unit.core.test_plug_ins import write_distribution

Rows = list[list[float]]


@dataclass
class Case:
    """Ragged responses: a list of numbers for each."""

    logprobs: Rows
    prox: Rows
    scored: Rows
    draws: Rows
    advantages: list[float]
    weights: Rows


def make_case(
    seed: int, *, sign: int = 0, longest: int = 6, noise: float = 0.3, weighted: bool = True
) -> Case:
    """Draws responses whose log-ratios have the standard deviation `noise`.

    All advantages get the `sign`, or signs of their own where it is 0.
    """
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(8)]
    prox = [[-rng.uniform(0.05, 3) for _ in range(length)] for length in lengths]
    logprobs = [[value + rng.gauss(0, noise) for value in row] for row in prox]
    advantages = [rng.gauss(0, 1) for _ in lengths]
    advantages[3] = 0.0
    if sign:
        advantages = [sign * (abs(value) + 0.1) for value in advantages]
    return Case(
        logprobs=logprobs,
        prox=prox,
        scored=[[value + rng.gauss(0, 0.01) for value in row] for row in logprobs],
        draws=[[rng.random() for _ in row] for row in prox],
        advantages=advantages,
        weights=[[rng.uniform(0.3, 2) if weighted else 1.0 for _ in row] for row in prox],
    )


CASES = {
    "mixed": make_case(1),
    "better responses only": make_case(2, sign=1),
    "worse responses only": make_case(3, sign=-1),
    "one token": make_case(4, longest=1),
    "stale": make_case(5, noise=1.5),
    "on policy": make_case(6, noise=0.0),
    "no advantages": replace(make_case(7), advantages=[0.0] * 8),
}


def padded(rows: Rows) -> torch.Tensor:
    """Returns rows as a tensor; masked positions are NaN."""
    width = max(map(len, rows)) + 1
    filled = [[*row, *[math.nan] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.float64)


def tokens_of(case: Case) -> Tokens:
    logprobs = padded(case.logprobs)
    advantages = [[a] * len(row) for a, row in zip(case.advantages, case.logprobs, strict=True)]
    return Tokens(
        logprobs=logprobs.requires_grad_(),
        proximal_logprobs=padded(case.prox),
        advantages=padded(advantages),
        mask=~logprobs.isnan(),
        weights=padded(case.weights),
        pre_update_logprobs=padded(case.scored),
        uniforms=padded(case.draws),
    )


def flat(tokens: Tokens) -> Tokens:
    """Returns the valid tokens in one dimension, as an objective's statistics get them."""
    assert tokens.pre_update_logprobs is not None
    assert tokens.uniforms is not None
    mask = tokens.mask
    return Tokens(
        logprobs=tokens.pre_update_logprobs[mask],
        proximal_logprobs=tokens.proximal_logprobs[mask],
        advantages=tokens.advantages[mask],
        mask=mask[mask],
        weights=tokens.weights[mask],
        pre_update_logprobs=tokens.pre_update_logprobs[mask],
        uniforms=tokens.uniforms[mask],
    )


def settings_of(name: str, **options: Any) -> Any:
    return OBJECTIVE_KINDS.sections[name](**options)


def computed(name: str, case: Case, **options: Any) -> tuple[Any, Tokens, dict[str, float]]:
    """Returns the losses, their tokens and the statistics of an objective."""
    objective, settings, tokens = get_objective(name), settings_of(name, **options), tokens_of(case)
    statistics: dict[str, float] = {}
    if objective.statistics is not None:
        statistics = objective.statistics(flat(tokens), settings)
    return objective.loss(tokens, settings, statistics), tokens, statistics


# ---- transcriptions, which return the losses of (case, log-probs, fixed log-probs) ----


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(case: Case, lp: Rows, fixed: Rows) -> Rows:
    """Returns -w min(r A, clip(r, 0.8, 1.28) A), at most -10 w A where A < 0."""
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        losses.append([])
        for t in range(len(lp[i])):
            r = math.exp(lp[i][t] - case.prox[i][t])
            loss = max(-r * a, -clip(r, 0.8, 1.28) * a)
            if a < 0:
                loss = min(loss, -10 * a)
            losses[i].append(case.weights[i][t] * loss)
    return losses


def gspo(case: Case, lp: Rows, fixed: Rows) -> Rows:
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        d = [x - y for x, y in zip(lp[i], case.prox[i], strict=True)]
        s = math.exp(min(10.0, sum(d) / len(d)))
        loss = max(-s * a, -clip(s, 1 - 3e-4, 1 + 4e-4) * a)
        losses.append([w * loss for w in case.weights[i]])
    return losses


def cispo(low: float, high: float) -> Callable[[Case, Rows, Rows], Rows]:
    def of(case: Case, lp: Rows, fixed: Rows) -> Rows:
        return [
            [
                -w * clip(math.exp(f - old), 1 - low, 1 + high) * a * x
                for x, f, old, w in zip(*rows, strict=True)
            ]
            for a, *rows in zip(case.advantages, lp, fixed, case.prox, case.weights, strict=True)
        ]

    return of


def sapo(case: Case, lp: Rows, fixed: Rows) -> Rows:
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        tau = 1.0 if a > 0 else 1.05
        losses.append([])
        for x, old, w in zip(lp[i], case.prox[i], case.weights[i], strict=True):
            sigma = 1 / (1 + math.exp(-tau * (math.exp(x - old) - 1)))
            losses[i].append(-w * a * sigma * 4 / tau)
    return losses


def gmpo(case: Case, lp: Rows, fixed: Rows) -> Rows:
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        sign = (a > 0) - (a < 0)
        d = [x - old for x, old in zip(lp[i], case.prox[i], strict=True)]
        d = [sign * min(sign * x, 0.4) for x in d]
        losses.append([-w * a * math.exp(sum(d) / len(d)) for w in case.weights[i]])
    return losses


def topr(level: str) -> Callable[[Case, Rows, Rows], Rows]:
    def of(case: Case, lp: Rows, fixed: Rows) -> Rows:
        losses: Rows = []
        for i, a in enumerate(case.advantages):
            ratios = [math.exp(f - old) for f, old in zip(fixed[i], case.prox[i], strict=True)]
            if level == "sequence":
                ratios = [math.prod(ratios)] * len(ratios)
            tapers = [1.0 if a > 0 else clip(r, 0, 1) for r in ratios]
            losses.append([-c * a * x for c, x in zip(tapers, lp[i], strict=True)])
        return losses

    return of


def all_tokens(case: Case) -> list[tuple[int, int]]:
    return [(i, t) for i, row in enumerate(case.prox) for t in range(len(row))]


def m2po_mask(case: Case, lp: Rows, fixed: Rows) -> Rows:
    """Drops the token with the largest second moment until their mean is below the budget."""
    kept = sorted(all_tokens(case), key=lambda at: scored_log_ratio(case, at) ** 2)
    while sum(scored_log_ratio(case, at) ** 2 for at in kept) / len(kept) >= 0.04:
        if len(kept) == 1:
            break
        kept.pop()
    return [
        [
            -math.exp(lp[i][t] - case.prox[i][t]) * a * case.weights[i][t]
            if (i, t) in kept
            else 0.0
            for t in range(len(lp[i]))
        ]
        for i, a in enumerate(case.advantages)
    ]


def scored_log_ratio(case: Case, at: tuple[int, int]) -> float:
    i, t = at
    return case.scored[i][t] - case.prox[i][t]


def m2po_clip(case: Case, lp: Rows, fixed: Rows) -> Rows:
    """Finds tau by bisection."""
    harmful = []
    for at in all_tokens(case):
        d, a = scored_log_ratio(case, at), case.advantages[at[0]]
        if (a > 0 and d > 0) or (a < 0 and d < 0):
            harmful.append(abs(d))
    low, high = 0.0, 50.0
    for _ in range(200):
        tau = (low + high) / 2
        fits = sum(min(d, tau) ** 2 for d in harmful) <= 0.04 * len(harmful)
        low, high = (tau, high) if fits else (low, tau)
    bounds = min(math.exp(-low), 0.7), max(math.exp(low), 1.5)
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        losses.append([])
        for x, old, w in zip(lp[i], case.prox[i], case.weights[i], strict=True):
            r = math.exp(x - old)
            losses[i].append(w * max(-r * a, -clip(r, *bounds) * a))
    return losses


def covariances(case: Case) -> dict[tuple[int, int], float]:
    positions = all_tokens(case)
    mean_a = sum(case.advantages[i] for i, _ in positions) / len(positions)
    mean_lp = sum(case.scored[i][t] for i, t in positions) / len(positions)
    return {
        (i, t): (case.advantages[i] - mean_a) * (case.scored[i][t] - mean_lp) for i, t in positions
    }


def clip_cov(case: Case, lp: Rows, fixed: Rows) -> Rows:
    """Uses a fraction of 0.2 and covariances of 0.1 to 2."""
    candidates = []
    for at, cov in covariances(case).items():
        r, a = math.exp(scored_log_ratio(case, at)), case.advantages[at[0]]
        cut = -clip(r, 0.8, 1.2) * a > -r * a
        if 0.1 < cov < 2 and not cut:
            candidates.append(at)
    candidates.sort(key=lambda at: case.draws[at[0]][at[1]])
    drawn = candidates[: max(int(0.2 * len(all_tokens(case))), 1)]
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        losses.append([])
        for t, (x, old, w) in enumerate(zip(lp[i], case.prox[i], case.weights[i], strict=True)):
            r = math.exp(x - old)
            loss = w * max(-r * a, -clip(r, 0.8, 1.2) * a)
            losses[i].append(0.0 if (i, t) in drawn else loss)
    return losses


def kl_cov(penalty: Callable[[float], float]) -> Callable[[Case, Rows, Rows], Rows]:
    def of(case: Case, lp: Rows, fixed: Rows) -> Rows:
        return kl_cov_with(penalty, case, lp)

    return of


def kl_cov_with(penalty: Callable[[float], float], case: Case, lp: Rows) -> Rows:
    """Uses a fraction of 0.2 and a coefficient of 0.7."""
    by_token = covariances(case)
    ordered = sorted(by_token, key=lambda at: (-by_token[at], case.draws[at[0]][at[1]]))
    chosen = ordered[: max(int(0.2 * len(ordered)), 1)]
    losses: Rows = []
    for i, a in enumerate(case.advantages):
        losses.append([])
        for t, (x, old, w) in enumerate(zip(lp[i], case.prox[i], case.weights[i], strict=True)):
            loss = -w * math.exp(x - old) * a
            losses[i].append(loss + 0.7 * penalty(x - old) * ((i, t) in chosen))
    return losses


def adaptive(**options: Any) -> Callable[[Case, Rows, Rows], Rows]:
    def of(case: Case, lp: Rows, fixed: Rows) -> Rows:
        low, high, _ = adaptive_search(case, **options)
        losses: Rows = []
        for i, a in enumerate(case.advantages):
            losses.append([])
            for x, old, w in zip(lp[i], case.prox[i], case.weights[i], strict=True):
                r = math.exp(x - old)
                losses[i].append(-w * min(r * a, clip(r, low, high) * a))
        return losses

    return of


def adaptive_search(
    case: Case,
    contribution: str = "gradient",
    order: str = "upper_first",
    token_weight: str = "rollout",
    target: float = 0.4,
) -> tuple[float, float, float]:
    """Runs Algorithm 1 with sums over all tokens in every iteration."""
    uppers = [(0, highs) for highs in range(37)], [(lows, 36) for lows in range(1, 16)]
    lowers = [(lows, 0) for lows in range(16)], [(15, highs) for highs in range(1, 37)]
    first, then = uppers if order == "upper_first" else lowers
    for lows, highs in [*first, *then]:  # steps of 0.02 from 0.6, and of 0.05 from 1.2
        low, high = 0.6 + 0.02 * lows, 1.2 + 0.05 * highs
        rho = adaptive_rho(case, low, high, contribution, token_weight)
        if rho >= target:
            break
    return low, high, rho


def adaptive_rho(
    case: Case, low: float, high: float, contribution: str, token_weight: str
) -> float:
    positive = negative = 0.0
    for i, t in all_tokens(case):
        a, r = case.advantages[i], math.exp(scored_log_ratio(case, (i, t)))
        u = math.exp(case.prox[i][t]) if token_weight == "rollout" else 1.0
        if contribution == "gradient":
            size = u * r * abs(a) * (r < high if a > 0 else r > low)
        else:
            size = u * abs(min(r * a, clip(r, 0 if a > 0 else low, high) * a))
        positive, negative = positive + size * (a > 0), negative + size * (a < 0)
    if positive == negative == 0:
        return 1.0
    if contribution == "literal":
        return positive / abs(positive - negative)
    if contribution == "ratio":
        return positive / (negative + 1e-8)
    return positive / (positive + negative)


ADAPTIVE = [
    {"contribution": contribution, "order": order, "token_weight": weight}
    for contribution in ("gradient", "share", "literal", "ratio")
    for order in ("upper_first", "lower_first")
    for weight in ("rollout", "none")
]
KL_COV = {"fraction": 0.2, "coefficient": 0.7}
TRANSCRIPTIONS: list[tuple[str, dict[str, Any], Callable[[Case, Rows, Rows], Rows]]] = [
    ("ppo", {}, ppo),
    ("gspo", {}, gspo),
    ("cispo", {}, cispo(1e9, 0.2)),
    ("cispo", {"clip_low": 0.3, "clip_high": 4.0}, cispo(0.3, 4.0)),
    ("sapo", {}, sapo),
    ("gmpo", {}, gmpo),
    ("topr", {}, topr("sequence")),
    ("topr", {"level": "token"}, topr("token")),
    ("m2po", {}, m2po_mask),
    ("m2po", {"rule": "clip"}, m2po_clip),
    ("clip_cov", {"fraction": 0.2, "covariances": (0.1, 2.0)}, clip_cov),
    ("kl_cov", KL_COV, kl_cov(lambda d: math.exp(d) - d - 1)),
    ("kl_cov", {**KL_COV, "penalty": "abs"}, kl_cov(abs)),
    *(("adaptive_clipping", options, adaptive(**options)) for options in ADAPTIVE),
]
IDS = ["-".join([name, *map(str, options.values())]) for name, options, _ in TRANSCRIPTIONS]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize(("name", "options", "transcription"), TRANSCRIPTIONS, ids=IDS)
def test_losses_and_gradients_are_those_of_the_equation(
    name: str, options: dict[str, Any], transcription: Any, case: Case
) -> None:
    if name in BEHAVIOR_OBJECTIVES:  # these take no importance weights
        case = replace(case, weights=[[1.0] * len(row) for row in case.prox])
    result, tokens, _ = computed(name, case, **options)
    expected = transcription(case, case.logprobs, case.logprobs)
    torch.testing.assert_close(
        result.losses[tokens.mask], padded(expected)[tokens.mask], atol=1e-9, rtol=1e-9
    )
    assert not result.losses[~tokens.mask].any()
    assert not result.clipped[~tokens.mask].any()
    result.losses.sum().backward()
    assert tokens.logprobs.grad is not None
    gradient = tokens.logprobs.grad
    assert not gradient[~tokens.mask].any()
    for i, t in all_tokens(case):
        sums = []
        for sign in (1, -1):
            moved = [list(row) for row in case.logprobs]
            moved[i][t] += sign * 1e-5
            sums.append(math.fsum(map(math.fsum, transcription(case, moved, case.logprobs))))
        expected_slope = (sums[0] - sums[1]) / 2e-5
        assert gradient[i, t].item() == pytest.approx(expected_slope, abs=1e-6), (i, t)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_clipped_tokens_are_those_that_the_paper_bounds(name: str) -> None:
    case = make_case(5, noise=1.0, weighted=False)
    result, tokens, _ = computed(name, case)
    result.losses.sum().backward()
    assert tokens.logprobs.grad is not None
    valid = tokens.mask & (tokens.advantages != 0)
    without_gradient = (tokens.logprobs.grad == 0) & valid
    if name in ("cispo", "topr"):  # these bound weights and leave every token a gradient
        assert not without_gradient.any()
        assert result.clipped.any()
    elif name in ("sapo", "kl_cov"):
        assert not result.clipped.any()
    else:
        assert torch.equal(without_gradient, result.clipped & valid)
        assert result.clipped.any()


@pytest.mark.parametrize("options", ADAPTIVE, ids=str)
@pytest.mark.parametrize("target", [0.1, 0.55, 0.95])
def test_the_search_ends_at_the_bounds_of_the_algorithm(
    options: dict[str, Any], target: float
) -> None:
    for seed in range(8):
        case = make_case(seed, noise=0.5, sign=-1 if seed == 6 else 0)
        _, _, statistics = computed("adaptive_clipping", case, **options, target=target)
        assert tuple(statistics.values()) == pytest.approx(
            adaptive_search(case, **options, target=target)
        )
        assert tuple(statistics) == ("clip/low", "clip/high", "clip/rho")


def test_a_higher_lower_bound_raises_rho_by_gradient_and_lowers_it_by_loss() -> None:
    """With a worse token at r = 0.7, `share` has a flaw that the default `gradient` has not."""
    ratios, advantages = torch.tensor([1.0, 0.7]), torch.tensor([1.0, -3.0])

    def rho(contribution: str, low: float) -> float:
        settings = AdaptiveClippingConfig(
            contribution=contribution, low_range=(low, low), high_range=(1.2, 1.2)
        )
        return search_bounds(ratios, advantages, torch.zeros(2), settings).rho

    assert rho("gradient", 0.6) < rho("gradient", 0.8) == 1.0
    assert rho("share", 0.6) > rho("share", 0.8)


def test_the_upper_bound_moves_where_the_lower_one_is_fixed() -> None:
    ratios, advantages = torch.tensor([1.6, 0.7]), torch.tensor([1.0, -1.0])
    settings = AdaptiveClippingConfig(low_range=(0.6, 0.6))
    bounds = search_bounds(ratios, advantages, torch.zeros(2), settings)
    assert (bounds.low, bounds.high) == (0.6, pytest.approx(1.65))


def test_at_least_one_token_is_kept_drawn_or_penalised() -> None:
    case = make_case(5, noise=3.0, weighted=False)
    result, tokens, _ = computed("m2po", case, budget=1e-12)
    assert (tokens.mask & ~result.clipped).sum() == 1
    plain, _, _ = computed("clip_cov", case, fraction=1e-9, covariances=(100.0, 101.0))
    drawn, _, _ = computed("clip_cov", case, fraction=1e-9, covariances=(-100.0, 100.0))
    assert (plain.losses != drawn.losses).sum() == 1
    none, _, _ = computed("kl_cov", case, fraction=1e-9, coefficient=1e-12)
    one, _, _ = computed("kl_cov", case, fraction=1e-9)
    assert ((one.losses - none.losses).abs() > 1e-6).sum() == 1


@pytest.mark.parametrize("ties", ["no advantages", "certain tokens"])
def test_kl_cov_penalises_its_share_of_tokens_of_equal_covariance(ties: str) -> None:
    """Covariances are all 0 without advantages, and equal for tokens of probability 1."""
    case = CASES["no advantages"]
    if ties == "certain tokens":
        scored = [[0.0 if i < 4 else -1.0] * len(row) for i, row in enumerate(case.scored)]
        case = replace(case, scored=scored, advantages=[1.0] * 4 + [-1.0] * 4)
    count = int(0.2 * len(all_tokens(case)))
    none, _, _ = computed("kl_cov", case, fraction=0.2, coefficient=1e-12)
    some, _, _ = computed("kl_cov", case, fraction=0.2)
    assert int((some.losses != none.losses).sum()) == count > 1


def test_the_shaped_ratio_is_that_of_the_equation() -> None:
    """The loss is -w A r / (r + gamma), its gradient by log pi -w A gamma r / (r + gamma)^2."""
    case, gamma = CASES["stale"], 0.1
    tokens = tokens_of(case)
    losses, clipped = shaped(tokens, gamma)
    losses.sum().backward()
    assert tokens.logprobs.grad is not None
    assert not clipped.any()
    for i, row in enumerate(case.logprobs):
        for t, logprob in enumerate(row):
            r = math.exp(logprob - case.prox[i][t])
            factor = case.weights[i][t] * case.advantages[i]
            gradient = -factor * gamma * r / (r + gamma) ** 2
            assert losses[i, t].item() == pytest.approx(-factor * r / (r + gamma), abs=1e-12)
            assert tokens.logprobs.grad[i, t].item() == pytest.approx(gradient, abs=1e-12)


def test_each_source_has_the_loss_of_its_settings() -> None:
    case = CASES["stale"]
    sources = ["fresh", "replayed", "reevaluated", "fresh", *["replayed"] * 3, "fresh"]
    loss = LossConfig.model_validate(
        {
            "correction": "behavior",
            "by_source": {
                "replayed": {"coefficient": 0.5, "clip_low": 0.05, "clip_high": 0.9},
                "reevaluated": {"shaping": 0.1},
            },
        }
    )
    objective = get_objective("ppo")
    masks = {
        source: torch.tensor([name == source for name in sources])[:, None]
        for source in set(sources)
    }
    losses, clipped = losses_by_source(objective, tokens_of(case), masks, loss, {})
    plain = objective.loss(tokens_of(case), PpoConfig(), {})
    settings = PpoConfig(clip_low=0.05, clip_high=0.9)
    replayed = objective.loss(tokens_of(case), settings, {})
    reevaluated = shaped(tokens_of(case), 0.1)
    for row, source in enumerate(sources):
        expected = {"fresh": plain, "replayed": replayed, "reevaluated": reevaluated}[source]
        factor = 0.5 if source == "replayed" else 1.0
        assert torch.equal(losses[row], factor * expected.losses[row]), source
        assert torch.equal(clipped[row], expected.clipped[row]), source
    assert not torch.equal(plain.losses[1], replayed.losses[1])


def test_a_bound_that_is_null_does_not_clip() -> None:
    tokens = tokens_of(CASES["stale"])
    settings = PpoConfig(clip_low=None, clip_high=None, dual_clip=None)
    losses, clipped = get_objective("ppo").loss(tokens, settings, {})
    assert not clipped.any()
    expected = torch.where(tokens.valid, -tokens.weighted_advantages * tokens.log_ratios.exp(), 0.0)
    assert torch.allclose(losses, expected)
    one_sided = PpoConfig(clip_low=None, dual_clip=None)
    _, clipped = get_objective("ppo").loss(tokens, one_sided, {})
    assert clipped.any()
    assert not clipped[tokens.valid & (tokens.advantages < 0)].any()


def test_the_configuration_knows_every_objective() -> None:
    assert list(OBJECTIVES) == list(OBJECTIVE_KINDS.sections)


def test_an_objective_of_an_installed_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    point = "mine = bapo_reinforce:reinforce"
    write_distribution(tmp_path, "bapo-reinforce", point, EXAMPLE, "bapo.objectives")
    point = "mine = bapo_reinforce_settings:ReinforceConfig"
    write_distribution(
        tmp_path, "bapo-reinforce-settings", point, SETTINGS, "bapo.objectives.settings"
    )
    config = LossConfig.model_validate({"objective": {"kind": "mine", "factor": 2.0}})
    assert config.model_dump()["objective"] == {"factor": 2.0, "kind": "mine"}
    case = CASES["mixed"]
    tokens = tokens_of(case)
    result = get_objective("mine").loss(tokens, config.objective, {})
    first = -2.0 * case.weights[0][0] * case.advantages[0] * case.logprobs[0][0]
    assert result.losses[0, 0].item() == pytest.approx(first)
    with pytest.raises(
        ConfigError, match=r"no objective 'other'; known objectives: adaptive_cl.*, mine"
    ):
        get_objective("other")
