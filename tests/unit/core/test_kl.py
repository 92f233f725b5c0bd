"""The KL estimators agree with worked examples and with the exact divergence."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_core.kl import Estimator, kl_penalty

ALPHA = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.double)
THETA = torch.tensor([[-0.7, -1.6, -0.5, -0.8]], dtype=torch.double)
MASK = torch.ones(1, 4, dtype=torch.bool)
ESTIMATORS = ["k1", "k2", "k3", "k3_corrected", "iw"]


@pytest.mark.parametrize(("estimator", "mean"), [("k3", 0.355485), ("iw", 2.997505)])
def test_k3_and_iw_agree_with_worked_examples(estimator: Estimator, mean: float) -> None:
    penalty = kl_penalty(THETA, ALPHA, ALPHA, MASK, estimator=estimator)
    assert penalty.mean().item() == pytest.approx(mean, abs=1e-6)


def test_k1_and_k2_agree_with_worked_examples() -> None:
    assert kl_penalty(THETA, ALPHA, ALPHA, MASK, estimator="k1")[0].tolist() == pytest.approx(
        [0.3, 0.4, 0.0, 2.2]
    )
    assert kl_penalty(THETA, ALPHA, ALPHA, MASK, estimator="k2")[0].tolist() == pytest.approx(
        [0.045, 0.08, 0.0, 2.42]
    )


# The policies choose among three tokens, so that an expectation is a sum and unbiasedness can be
# checked exactly.
PI = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.double)
REF = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.double)
EXACT = (PI * (PI / REF).log()).sum().item()


# A third policy samples the tokens where a group is stored and the reference is the initial model.
OTHER = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.double)


def expectation(
    sampler: torch.Tensor, estimator: Estimator, theta: torch.Tensor = PI
) -> torch.Tensor:
    penalty = kl_penalty(
        theta.log(), REF.log(), sampler.log(), torch.ones(1, 3), estimator=estimator
    )
    return (sampler * penalty).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_corrected", "iw"])
def test_estimators_are_unbiased_for_samples_of_the_policy(estimator: Estimator) -> None:
    assert expectation(PI, estimator).item() == pytest.approx(EXACT)


@pytest.mark.parametrize("sampler", [REF, OTHER], ids=["reference", "a third policy"])
def test_corrected_estimators_are_unbiased_for_any_sampler(sampler: torch.Tensor) -> None:
    corrected: list[Estimator] = ["k3_corrected", "iw"]
    for estimator in corrected:
        assert expectation(sampler, estimator).item() == pytest.approx(EXACT)
    uncorrected: list[Estimator] = ["k1", "k3"]
    for estimator in uncorrected:
        assert expectation(sampler, estimator).item() != pytest.approx(EXACT, rel=0.01)


@pytest.mark.parametrize("estimator", ["k3_corrected", "iw"])
def test_gradients_of_corrected_estimators_are_those_of_the_divergence(
    estimator: Estimator,
) -> None:
    logits = PI.log().requires_grad_()
    theta = torch.softmax(logits, dim=1)
    (exact,) = torch.autograd.grad((theta * (theta / REF).log()).sum(), logits)
    theta = torch.softmax(logits, dim=1)
    (gradient,) = torch.autograd.grad(expectation(OTHER, estimator, theta), logits)
    torch.testing.assert_close(gradient, exact)


def test_k3_is_clamped_at_ten() -> None:
    far, zero = torch.tensor([-40.0]), torch.zeros(1)
    penalty = kl_penalty(far, zero, far, torch.ones(1), estimator="k3")
    assert penalty.tolist() == [10.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_penalty_where_the_policies_agree(estimator: Estimator) -> None:
    assert kl_penalty(THETA, THETA, THETA, MASK, estimator=estimator).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_have_no_influence(estimator: Estimator, poison: float) -> None:
    logprobs = torch.tensor([[-1.0, poison]], requires_grad=True)
    other = torch.tensor([[-2.0, 0.0]])
    penalty = kl_penalty(logprobs, other, other, torch.tensor([[1, 0]]), estimator=estimator)
    penalty.sum().backward()
    assert penalty[0, 1] == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1] == 0.0
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("d", [-1e4, 1e4])
def test_distant_policies_stay_finite(estimator: Estimator, d: float) -> None:
    logprobs = torch.tensor([d], requires_grad=True)
    penalty = kl_penalty(
        logprobs, torch.zeros(1), torch.zeros(1), torch.ones(1), estimator=estimator
    )
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
