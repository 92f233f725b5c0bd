"""bapo computes what verl computes, and differs where docs/parity.md says so.

Losses are compared in values and in gradients with respect to the log-probs, on random ragged
responses in float64. verl's functions run as they are installed; only settings are given, where the
defaults differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_core.advantages import gae, whiten
from bapo_core.config import ConfigError, load_config
from bapo_core.config.loss import LossConfig, ProxCurrentConfig
from bapo_core.importance import mismatch_metrics, truncated_weights, weight_metrics
from bapo_core.kl import kl_penalty
from bapo_core.losses import AGGREGATIONS, Aggregation, aggregate, scale_count, token_scale
from services.trainer.targets import Targets
from tests.parity.cases import (
    CASES,
    GROUPS,
    Case,
    Groups,
    Loss,
    assert_same,
    make_case,
    moments,
    our_advantages,
    our_loss,
    responses_of,
    rewards_by_token,
    single_token,
)

pytestmark = pytest.mark.parity

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
each_aggregation = pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
each_groups = pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
POLICY_LOSS_KEYS = (
    "clip_cov_ratio",
    "clip_cov_lb",
    "clip_cov_ub",
    "kl_cov_ratio",
    "ppo_kl_coef",
)


def their_loss(
    verl: Any,
    case: Case,
    name: str,
    aggregation: Aggregation = "token-mean",
    *,
    weights: Tensor | None = None,
    longest: int = 1,
    **settings: Any,
) -> Loss:
    """Returns the loss of one of verl's objectives."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    own = {key: settings.pop(key) for key in POLICY_LOSS_KEYS if key in settings}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**own),
        **settings,
    )
    config.global_batch_info["loss_scale_factor"] = longest
    logprobs = case.logprobs.clone().requires_grad_()
    loss, metrics = verl.get_policy_loss_fn(name)(
        case.old_logprobs,
        logprobs,
        case.advantages,
        case.mask.long(),
        aggregation,
        config,
        weights,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    clipped = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")
    return Loss(loss.detach(), gradient, sum(metrics.get(name, 0.0) for name in clipped))


def their_advantages(verl: Any, groups: Groups, name: str, **arguments: Any) -> Tensor:
    """Returns the advantages of tokens by one of verl's estimators, (M, R)."""
    responses = responses_of(groups)
    index = np.array([i for i, group in enumerate(groups) for _ in group])
    advantages, _ = verl.get_adv_estimator_fn(name)(
        token_level_rewards=rewards_by_token(responses),
        response_mask=responses.mask.long(),
        index=index,
        **arguments,
    )
    return advantages


# -- objectives


@each_case
@each_aggregation
def test_ppo_equals_vanilla(verl: Any, case: Case, aggregation: Aggregation) -> None:
    ours = our_loss(
        case,
        "ppo",
        aggregation,
        weights=case.weights,
        longest=9,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    theirs = their_loss(
        verl,
        case,
        "vanilla",
        aggregation,
        weights=case.weights,
        longest=9,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    assert_same(ours, theirs)
    assert ours.clipped == pytest.approx(theirs.clipped)


@pytest.mark.parametrize("log_ratio", [25.0, -25.0])
@pytest.mark.parametrize(("ours", "theirs"), [("ppo", "vanilla"), ("sapo", "sapo")])
def test_the_log_ratio_is_clamped_at_20_by_both(
    verl: Any, ours: str, theirs: str, log_ratio: float
) -> None:
    case = single_token(log_ratio, advantage=-1.0)
    settings = {"dual_clip": None, "clip_high": 0.2} if ours == "ppo" else {}
    theirs_unclipped = {"clip_ratio_c": 1e12} if ours == "ppo" else {}
    aggregation: Aggregation = "seq-mean-token-mean"
    assert_same(
        our_loss(case, ours, aggregation, **settings),
        their_loss(verl, case, theirs, aggregation, **theirs_unclipped),
    )


@each_case
@each_aggregation
def test_gspo_equals_gspo(verl: Any, case: Case, aggregation: Aggregation) -> None:
    weights = case.response_weights
    ours = our_loss(case, "gspo", aggregation, weights=weights, longest=9)
    bounds = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    theirs = their_loss(verl, case, "gspo", aggregation, weights=weights, longest=9, **bounds)
    assert_same(ours, theirs)
    assert ours.clipped == pytest.approx(theirs.clipped)


def test_gspo_with_weights_of_tokens_differs_in_the_gradient_alone(verl: Any) -> None:
    case = CASES["stale"]
    arguments = ("gspo", "seq-mean-token-mean")
    ours = our_loss(case, *arguments, weights=case.weights, clip_low=0.9, clip_high=9.0)
    bounds = {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    theirs = their_loss(verl, case, *arguments, weights=case.weights, **bounds)
    assert_same(ours.value, theirs.value)
    # The mean of the weights of a response, in place of the token's own.
    counts = case.mask.sum(dim=1, keepdim=True)
    means = (case.weights * case.mask).sum(dim=1, keepdim=True) / counts
    assert_same(ours.gradient, theirs.gradient / case.weights * means)
    assert not torch.allclose(ours.gradient, theirs.gradient, rtol=0.01)


@pytest.mark.parametrize("algorithm", ["gspo", "gmpo"])
def test_weights_of_tokens_are_refused_with_one_ratio_for_a_response(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="weight_level"):
        load_config(
            None,
            [
                f"algorithm={algorithm}",
                "loss.correction=prox_current",
                "loss.correction.weight_level=token",
            ],
        )


@pytest.mark.parametrize(("log_ratio", "expected"), [(12.0, 10.0), (-25.0, -20.0)])
def test_gspo_bounds_its_ratio_below_too(verl: Any, log_ratio: float, expected: float) -> None:
    case = single_token(log_ratio, advantage=-1.0 if log_ratio > 0 else 1.0)
    ours = our_loss(case, "gspo", clip_low=0.5, clip_high=0.5)
    theirs = their_loss(verl, case, "gspo", clip_ratio_low=0.5, clip_ratio_high=0.5)
    assert float(ours.value.abs().log()) == pytest.approx(expected)
    limit = 10.0 if log_ratio > 0 else log_ratio
    assert float(theirs.value.abs().log()) == pytest.approx(limit)


@each_case
def test_cispo_equals_cispo(verl: Any, case: Case) -> None:
    ours = our_loss(case, "cispo", weights=case.weights, clip_low=0.2, clip_high=0.3)
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    theirs = their_loss(verl, case, "cispo", weights=case.weights, **bounds)
    assert_same(ours, theirs)
    assert ours.clipped == pytest.approx(theirs.clipped)


def test_cispo_has_a_lower_bound_by_default_in_verl_only(verl: Any) -> None:
    case = single_token(-1.0)
    assert float(our_loss(case, "cispo").gradient) == pytest.approx(-np.exp(-1.0))
    assert float(their_loss(verl, case, "cispo").gradient) == pytest.approx(-0.8)


@each_case
def test_sapo_equals_sapo(verl: Any, case: Case) -> None:
    ours = our_loss(case, "sapo", "seq-mean-token-mean", weights=case.weights)
    theirs = their_loss(verl, case, "sapo", "seq-mean-token-mean", weights=case.weights)
    assert_same(ours, theirs)


def test_sapo_of_verl_has_one_aggregation(verl: Any) -> None:
    case = CASES["mixed"]
    by_sequence = their_loss(verl, case, "sapo", "seq-mean-token-mean").value
    assert their_loss(verl, case, "sapo", "token-mean").value == by_sequence
    assert our_loss(case, "sapo", "token-mean").value != pytest.approx(float(by_sequence))


@each_case
def test_gmpo_equals_geo_mean(verl: Any, case: Case) -> None:
    weights = case.response_weights
    ours = our_loss(case, "gmpo", "seq-mean-token-mean", weights=weights)
    bounds = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    assert_same(ours, their_loss(verl, case, "geo_mean", weights=weights, **bounds))


def test_gmpo_takes_the_arithmetic_mean_of_weights_and_verl_the_geometric(verl: Any) -> None:
    case = CASES["stale"]
    bounds = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    theirs = their_loss(verl, case, "geo_mean", weights=case.weights, **bounds)
    counts = case.mask.sum(dim=1, keepdim=True)
    logs = torch.where(case.mask, case.weights.log(), 0.0).sum(dim=1, keepdim=True)
    means = (logs / counts).exp().expand_as(case.weights)
    assert_same(our_loss(case, "gmpo", "seq-mean-token-mean", weights=means), theirs)
    ours = our_loss(case, "gmpo", "seq-mean-token-mean", weights=case.weights)
    assert float(ours.value) != pytest.approx(float(theirs.value), rel=0.01)


def test_gmpo_of_verl_counts_responses_without_tokens(verl: Any) -> None:
    case = CASES["mixed"]
    mask = case.mask.clone()
    mask[:4] = False
    half = replace(case, mask=mask)
    bounds = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    theirs = their_loss(verl, half, "geo_mean", **bounds)
    assert_same(our_loss(half, "gmpo", "seq-mean-token-mean").value, 2 * theirs.value)


def test_gmpo_of_verl_reports_tokens_as_clipped_that_are_not(verl: Any) -> None:
    case = single_token(-1.0, advantage=1.0)
    bounds = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    ours, theirs = our_loss(case, "gmpo"), their_loss(verl, case, "geo_mean", **bounds)
    assert_same(ours, theirs)
    assert float(ours.gradient) != 0.0
    assert (ours.clipped, theirs.clipped) == (0.0, pytest.approx(1.0))


COVARIANCES = (0.2, 2.0)


@each_case
def test_clip_cov_equals_clip_cov_if_all_candidates_are_cut_off(verl: Any, case: Case) -> None:
    ours = our_loss(
        case, "clip_cov", weights=case.weights, fraction=0.99, covariances=list(COVARIANCES)
    )
    low, high = COVARIANCES
    settings = {"clip_cov_ratio": 0.99, "clip_cov_lb": low, "clip_cov_ub": high}
    assert_same(ours, their_loss(verl, case, "clip_cov", weights=case.weights, **settings))


def test_clip_cov_draws_as_many_tokens_by_other_random_numbers(verl: Any) -> None:
    case = make_case(8, sign=1, longest=20)
    ours = our_loss(case, "clip_cov", fraction=0.05, covariances=list(COVARIANCES))
    low, high = COVARIANCES
    settings = {"clip_cov_ratio": 0.05, "clip_cov_lb": low, "clip_cov_ub": high}
    torch.manual_seed(0)
    theirs = their_loss(verl, case, "clip_cov", **settings)
    other_draw = their_loss(verl, case, "clip_cov", **settings)
    torch.manual_seed(0)
    assert_same(their_loss(verl, case, "clip_cov", **settings), theirs)
    cut = [((loss.gradient == 0) & case.mask).sum() for loss in (ours, theirs, other_draw)]
    assert cut[0] == cut[1] == cut[2]
    assert not torch.equal(theirs.gradient, other_draw.gradient)


@each_case
def test_kl_cov_equals_kl_cov_with_the_absolute_penalty(verl: Any, case: Case) -> None:
    ours = our_loss(case, "kl_cov", fraction=0.3, penalty="abs")
    assert_same(ours, their_loss(verl, case, "kl_cov", kl_cov_ratio=0.3, ppo_kl_coef=1.0))


def test_kl_cov_of_verl_weighs_the_penalty_too(verl: Any) -> None:
    case = single_token(0.5, advantage=0.0)
    ours = our_loss(case, "kl_cov", weights=0.5 * case.weights, penalty="abs")
    settings = {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0}
    theirs = their_loss(verl, case, "kl_cov", weights=0.5 * case.weights, **settings)
    assert (float(ours.value), float(theirs.value)) == (pytest.approx(0.5), pytest.approx(0.25))


def test_kl_cov_penalises_by_an_estimate_of_the_kl_unless_told_otherwise(verl: Any) -> None:
    case = single_token(0.5, advantage=0.0)
    ours, theirs = our_loss(case, "kl_cov"), their_loss(verl, case, "kl_cov", ppo_kl_coef=1.0)
    assert float(ours.value) == pytest.approx(np.exp(0.5) - 0.5 - 1.0)
    assert float(theirs.value) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("clip_cov", {}, "clip_cov"),
        ("kl_cov", {"penalty": "abs"}, "kl_cov"),
        ("gmpo", {}, "geo_mean"),
    ],
)
def test_these_log_ratios_are_clamped_here_alone(
    verl: Any, name: str, settings: dict[str, Any], theirs: str
) -> None:
    # No clip bounds the rise of a ratio where the advantage is negative.
    case = single_token(25.0, advantage=-1.0)
    assert float(our_loss(case, name, **settings).value.log()) == pytest.approx(20.0)
    assert float(their_loss(verl, case, theirs).value.log()) == pytest.approx(25.0)


def test_topr_equals_gpg_where_all_advantages_are_positive(verl: Any) -> None:
    case = CASES["better responses only"]
    assert_same(our_loss(case, "topr"), their_loss(verl, case, "gpg"))


@each_aggregation
def test_padding_may_be_nan_here_and_in_the_token_mean_of_verl(
    verl: Any, aggregation: Aggregation
) -> None:
    case = CASES["mixed"]
    padded = replace(case, logprobs=torch.where(case.mask, case.logprobs, torch.nan))
    assert_same(our_loss(padded, "ppo", aggregation), our_loss(case, "ppo", aggregation))
    theirs = their_loss(verl, padded, "vanilla", aggregation)
    assert bool(theirs.value.isnan()) == (aggregation != "token-mean")


def test_defaults_of_verl(verl: Any) -> None:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    from bapo_core.config.objectives import KlCovConfig, PpoConfig, SapoConfig

    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    assert (actor.clip_ratio_high, PpoConfig().clip_high) == (0.2, 0.28)
    assert (actor.clip_ratio_c, PpoConfig().dual_clip) == (3.0, 10.0)
    assert (PolicyLossConfig().ppo_kl_coef, KlCovConfig().coefficient) == (0.1, 1.0)
    assert actor.tau_pos == SapoConfig().positive_temperature
    assert actor.tau_neg == SapoConfig().negative_temperature


def test_every_objective_of_verl_is_on_the_page(verl: Any) -> None:
    compared = {"vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "gpg"}
    without_counterpart = {"dppo_tv", "dppo_kl", "dro", "bypass_mode"}
    assert set(verl.POLICY_LOSS_REGISTRY) == compared | without_counterpart


# -- aggregations


@each_aggregation
def test_aggregations_equal_agg_loss(verl: Any, aggregation: Aggregation) -> None:
    case = CASES["mixed"]
    mask = case.mask.clone()
    mask[2] = False
    theirs = verl.agg_loss(case.logprobs, mask.long(), aggregation, loss_scale_factor=9)
    assert_same(aggregate(case.logprobs, mask, aggregation, longest=9), theirs)


@each_aggregation
def test_micro_batches_sum_to_the_minibatch_in_both(verl: Any, aggregation: Aggregation) -> None:
    case = CASES["mixed"]
    count = scale_count(case.mask, aggregation)
    whole = aggregate(case.logprobs, case.mask, aggregation, longest=9)
    for rows in (slice(0, 3), slice(3, 8)):
        losses, mask = case.logprobs[rows], case.mask[rows]
        scale = token_scale(mask, aggregation, longest=9, count=count)
        theirs = verl.agg_loss(
            losses,
            mask.long(),
            aggregation,
            batch_num_tokens=int(case.mask.sum()),
            global_batch_size=8,
            loss_scale_factor=9,
        )
        assert_same((losses * scale).sum(), theirs)
        whole = whole - theirs
    assert_same(whole, torch.zeros_like(whole))


def test_the_norm_of_a_sum_is_the_width_of_the_batch_in_verl_by_default(verl: Any) -> None:
    case = CASES["mixed"]
    mode: Aggregation = "seq-mean-token-sum-norm"
    theirs = verl.agg_loss(case.logprobs, case.mask.long(), mode)
    width = case.mask.shape[1]
    assert_same(aggregate(case.logprobs, case.mask, mode, longest=width), theirs)


@each_aggregation
def test_a_batch_without_tokens_has_no_loss_here_and_nan_in_verl(
    verl: Any, aggregation: Aggregation
) -> None:
    losses, mask = torch.ones(2, 3), torch.zeros(2, 3)
    assert float(aggregate(losses, mask, aggregation)) == 0.0
    assert bool(verl.agg_loss(losses, mask, aggregation).isnan())


# -- estimators of advantages


@each_groups
def test_group_with_the_sample_deviation_equals_grpo(verl: Any, groups: Groups) -> None:
    ours = our_advantages(responses_of(groups), "group", std="sample")
    assert_same(ours, their_advantages(verl, groups, "grpo"))


@each_groups
def test_group_equals_grpo_vectorized_in_single_precision(verl: Any, groups: Groups) -> None:
    ours = our_advantages(responses_of(groups), "group", std="sample")
    theirs = their_advantages(verl, groups, "grpo_vectorized")
    assert_same(ours, theirs)


@each_groups
def test_group_without_a_scale_equals_grpo_without_the_deviation(verl: Any, groups: Groups) -> None:
    ours = our_advantages(responses_of(groups), "group", scale="none")
    assert_same(ours, their_advantages(verl, groups, "grpo", norm_adv_by_std_in_grpo=False))


def test_the_default_deviation_is_the_population_here_and_the_sample_in_verl(verl: Any) -> None:
    groups = [[1.0, 0.0, 0.0, 0.0]]
    ours = our_advantages(responses_of(groups), "group")
    theirs = their_advantages(verl, groups, "grpo")
    # Under the root, eps counts half as much, relative to the variance of 3/16.
    torch.testing.assert_close(ours, theirs * (4 / 3) ** 0.5, rtol=1e-5, atol=0.0)


def test_equal_rewards_have_advantages_of_exactly_0_here_alone(verl: Any) -> None:
    # The mean of these floats differs from them by one unit in the last place.
    rewards = torch.full((1, 3), 0.9)
    responses = replace(responses_of([[0.9] * 3]), rewards=rewards)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        rewards.T.clone(), torch.ones(3, 1), np.zeros(3, dtype=int)
    )
    assert not our_advantages(responses, "group", std="sample").any()
    assert theirs.flatten().tolist() == pytest.approx([0.056] * 3, abs=1e-3)


@pytest.mark.parametrize(
    ("estimator", "theirs", "expected"),
    [
        ("group", "grpo", 0.7),
        ("rloo", "rloo", 0.7),
        ("rloo", "rloo_vectorized", 0.0),
        ("opo", "opo", 0.7),
    ],
)
def test_a_response_without_others_has_no_advantage_here(
    verl: Any, estimator: str, theirs: str, expected: float
) -> None:
    groups = [[0.7], [1.0, 0.0]]
    assert float(our_advantages(responses_of(groups), estimator)[0, 0]) == 0.0
    assert float(their_advantages(verl, groups, theirs)[0, 0]) == pytest.approx(expected)


@each_groups
@pytest.mark.parametrize(
    ("estimator", "theirs"),
    [
        ("rloo", "rloo"),
        ("rloo", "rloo_vectorized"),
        ("opo", "opo"),
    ],
)
def test_rloo_and_opo_equal_theirs(verl: Any, estimator: str, theirs: str, groups: Groups) -> None:
    ours = our_advantages(responses_of(groups), estimator)
    assert_same(ours, their_advantages(verl, groups, theirs))


@each_groups
def test_reinforce_pp_baseline_equals_reinforce_plus_plus_baseline(
    verl: Any, groups: Groups
) -> None:
    ours = our_advantages(responses_of(groups), "reinforce_pp_baseline")
    assert_same(ours, their_advantages(verl, groups, "reinforce_plus_plus_baseline"))


@each_groups
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_equals_reinforce_plus_plus(verl: Any, groups: Groups, gamma: float) -> None:
    responses = responses_of(groups, penalised=True)
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        rewards_by_token(responses), responses.mask.long(), verl.AlgoConfig(gamma=gamma)
    )
    assert_same(our_advantages(responses, "reinforce_pp", gamma=gamma), theirs)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9)])
def test_gae_with_whitening_equals_gae(verl: Any, gamma: float, lam: float) -> None:
    case = CASES["mixed"]
    mask = case.mask.clone()
    mask[:, 1] = False  # a token that the policy did not sample, inside of responses
    mask[0, 2:4] = True
    rewards, values = case.logprobs * mask, case.advantages
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    theirs, their_returns = verl.compute_gae_advantage_return(
        rewards, values, mask.long(), gamma, lam
    )
    assert_same(whiten(advantages, mask, moments), theirs * mask)
    assert_same(returns, their_returns * mask)
    assert (theirs[~mask] != 0).any()


def test_every_estimator_of_verl_is_on_the_page(verl: Any) -> None:
    compared = {
        "grpo",
        "grpo_vectorized",
        "rloo",
        "rloo_vectorized",
        "opo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
    }
    without_counterpart = {
        "remax",
        "gpg",
        "gdpo",
        "grpo_passk",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
    assert set(verl.ADV_ESTIMATOR_REGISTRY) == compared | without_counterpart


# -- KL estimators


@pytest.mark.parametrize(
    ("estimator", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")]
)
@pytest.mark.parametrize("noise", [0.3, 3.0, 30.0])
def test_kl_estimators_equal_kl_penalty(
    verl: Any, estimator: Any, theirs: str, noise: float
) -> None:
    case = make_case(9, noise=noise)
    results = []
    for estimate in (
        lambda logprobs: kl_penalty(
            logprobs, case.old_logprobs, case.old_logprobs, case.mask, estimator=estimator
        ),
        lambda logprobs: verl.kl_penalty(logprobs, case.old_logprobs, theirs) * case.mask,
    ):
        logprobs = case.logprobs.clone().requires_grad_()
        penalties = estimate(logprobs)
        (gradient,) = torch.autograd.grad(penalties.sum(), logprobs)
        results.append(Loss(penalties.detach(), gradient, 0.0))
    assert_same(*results)
    if estimator == "k3" and noise == 30.0:
        assert float(results[0].value.max()) == 10.0


# -- importance weights


def weights_of(
    correction: Any, case: Case, level: str, threshold: float | str, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """Returns verl's weights of the log-probs over the old ones, and their metrics."""
    log_ratios = case.logprobs - case.old_logprobs
    weights, metrics = correction.compute_rollout_correction_weights(
        log_ratios, case.mask.double(), level, threshold, **options
    )
    return weights, metrics


@each_case
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"mode": "truncate", "cap": 2.0}, 2.0),
        ({"mode": "mask", "floor": 0.5, "cap": 2.0}, "0.5_2.0"),
    ],
    ids=["truncate", "mask"],
)
def test_importance_weights_equal_rollout_correction(
    correction: Any, case: Case, level: Any, ours: Any, theirs: float | str
) -> None:
    arguments = (case.logprobs, case.old_logprobs, case.mask)
    weights, metrics = weights_of(correction, case, level, theirs)
    assert_same(truncated_weights(*arguments, level=level, **ours), weights)
    described = weight_metrics(*arguments, level=level, **ours)
    expected = metrics["rollout_is_eff_sample_size"]
    assert described["ess_fraction"] == pytest.approx(expected, rel=1e-6)


def test_a_truncated_weight_of_verl_has_no_floor(correction: Any) -> None:
    case = single_token(-2.0)
    arguments = (case.logprobs, case.old_logprobs, case.mask)
    assert float(truncated_weights(*arguments, cap=2.0, floor=0.5)) == 0.5
    assert float(weights_of(correction, case, "token", 2.0)[0]) == pytest.approx(np.exp(-2.0))


def test_a_sequence_weight_of_verl_sums_log_ratios_that_are_not_clamped(correction: Any) -> None:
    ones = torch.ones(1, 2, dtype=torch.float64)
    case = Case(torch.tensor([[-1.0, -31.0]]), torch.tensor([[-31.0, -2.0]]), ones, ones > 0, ones)
    weights = truncated_weights(
        case.logprobs, case.old_logprobs, case.mask, cap=9.0, level="sequence"
    )
    # 30 - 29 without the clamp, 20 - 20 with it.
    assert weights[0].tolist() == [1.0, 1.0]
    theirs, _ = weights_of(correction, case, "sequence", 9.0)
    assert theirs[0].tolist() == pytest.approx([np.e, np.e])


@pytest.mark.parametrize("seed", range(5))
def test_geometric_masking_is_rejection_by_the_mean_of_k1_with_inverse_bounds(
    correction: Any, seed: int
) -> None:
    case = make_case(seed, noise=1.0)
    ours = truncated_weights(
        case.logprobs,
        case.old_logprobs,
        case.mask,
        mode="mask",
        floor=0.8,
        cap=2.0,
        level="geometric",
    )
    kept, _ = correction.compute_rollout_rejection_mask(
        case.logprobs - case.old_logprobs, case.mask.double(), "seq_mean_k1", "0.5_1.25"
    )
    assert torch.equal(ours != 0, kept.bool())
    # A kept response has its geometric mean as its weight here; verl takes rejected ones out of the
    # loss mask and gives the others no weight by it.
    assert set(kept.unique().tolist()) <= {0.0, 1.0}
    assert (ours[kept.bool()] != 1.0).any()


def normalised(case: Case, level: str) -> Tensor:
    """Returns the trainer's weights under `loss.correction.weight_norm: batch`."""
    correction = ProxCurrentConfig(weight_cap=2.0, weight_norm="batch", weight_level=level)
    no_rows = torch.zeros(len(case.mask), 1, dtype=torch.bool)
    targets = Targets(
        loss=LossConfig(correction=correction),
        valid=case.mask,
        mask=case.mask,
        advantages=torch.zeros_like(case.logprobs),
        behavior_logprobs=case.old_logprobs,
        current_logprobs=case.logprobs,
        scored=~no_rows,
        demonstrated=no_rows,
        replayed=no_rows,
    )
    # As `Updater` takes the mean over the ranks.
    mean, _, _ = moments(targets.weights[case.mask])
    return replace(targets, weight_mean=mean).weights


@each_case
def test_weights_of_tokens_normalised_over_the_batch_equal(correction: Any, case: Case) -> None:
    theirs, _ = weights_of(correction, case, "token", 2.0, rollout_is_batch_normalize=True)
    assert_same(normalised(case, "token"), theirs)


def test_weights_of_sequences_are_normalised_by_tokens_here_and_by_sequences_in_verl(
    correction: Any,
) -> None:
    case = CASES["stale"]
    ours = normalised(case, "sequence")
    theirs, _ = weights_of(correction, case, "sequence", 2.0, rollout_is_batch_normalize=True)
    assert float(ours[case.mask].mean()) == pytest.approx(1.0)
    # Every response has a first token.
    assert float(theirs[:, 0].mean()) == pytest.approx(1.0)
    assert float(theirs[case.mask].mean()) != pytest.approx(1.0, rel=0.01)


@each_case
def test_the_mismatch_kl_equals_k3_kl(correction: Any, case: Case) -> None:
    ours = mismatch_metrics(case.logprobs, case.old_logprobs, case.mask)
    theirs = correction.compute_offpolicy_metrics(
        case.logprobs, case.old_logprobs, case.mask.double()
    )
    assert ours["mismatch_kl"] == pytest.approx(theirs["k3_kl"], abs=1e-6)
