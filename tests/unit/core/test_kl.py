"""The KL estimators agree with worked examples and with the exact divergence."""

import math

import pytest
import torch

from bapo_core.kl import kl_penalty

ALPHA = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.double)
THETA = torch.tensor([[-0.7, -1.6, -0.5, -0.8]], dtype=torch.double)
MASK = torch.ones(1, 4, dtype=torch.bool)
ESTIMATORS = ["k1", "k2", "k3", "k3_corrected", "iw"]


@pytest.mark.parametrize(("estimator", "mean"), [("k3", 0.355485), ("iw", 2.997505)])
def test_kl(estimator, mean):
    penalty = kl_penalty(THETA, ALPHA, ALPHA, MASK, estimator=estimator)
    assert penalty.mean().item() == pytest.approx(mean, abs=1e-6)


def test_k1_and_k2():
    assert kl_penalty(THETA, ALPHA, ALPHA, MASK, estimator="k1")[0].tolist() == pytest.approx(
        [0.3, 0.4, 0.0, 2.2]
    )
    assert kl_penalty(THETA, ALPHA, ALPHA, MASK, estimator="k2")[0].tolist() == pytest.approx(
        [0.045, 0.08, 0.0, 2.42]
    )


# Two policies over three tokens: an expectation is a sum, so unbiasedness can be checked exactly.
PI = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.double)
REF = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.double)
EXACT = (PI * (PI / REF).log()).sum().item()


# A third policy that sampled the tokens: a stored group's, with the initial model as reference.
OTHER = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.double)


def expectation(sampler, estimator, theta=PI):
    penalty = kl_penalty(
        theta.log(), REF.log(), sampler.log(), torch.ones(1, 3), estimator=estimator
    )
    return (sampler * penalty).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_corrected", "iw"])
def test_estimators_are_unbiased_for_samples_of_the_policy(estimator):
    assert expectation(PI, estimator).item() == pytest.approx(EXACT)


@pytest.mark.parametrize("sampler", [REF, OTHER], ids=["reference", "a third policy"])
def test_corrected_estimators_are_unbiased_for_any_sampler(sampler):
    for estimator in ("k3_corrected", "iw"):
        assert expectation(sampler, estimator).item() == pytest.approx(EXACT)
    for estimator in ("k1", "k3"):
        assert expectation(sampler, estimator).item() != pytest.approx(EXACT, rel=0.01)


@pytest.mark.parametrize("estimator", ["k3_corrected", "iw"])
def test_gradients_of_corrected_estimators_are_those_of_the_divergence(estimator):
    logits = PI.log().requires_grad_()
    theta = torch.softmax(logits, dim=1)
    (exact,) = torch.autograd.grad((theta * (theta / REF).log()).sum(), logits)
    theta = torch.softmax(logits, dim=1)
    (found,) = torch.autograd.grad(expectation(OTHER, estimator, theta), logits)
    torch.testing.assert_close(found, exact)


def test_k3_is_at_most_ten():
    far, zero = torch.tensor([-40.0]), torch.zeros(1)
    penalty = kl_penalty(far, zero, far, torch.ones(1), estimator="k3")
    assert penalty.tolist() == [10.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_penalty_where_the_policies_agree(estimator):
    assert kl_penalty(THETA, THETA, THETA, MASK, estimator=estimator).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_never_matter(estimator, poison):
    logprobs = torch.tensor([[-1.0, poison]], requires_grad=True)
    other = torch.tensor([[-2.0, 0.0]])
    penalty = kl_penalty(logprobs, other, other, torch.tensor([[1, 0]]), estimator=estimator)
    penalty.sum().backward()
    assert penalty[0, 1] == 0.0
    assert logprobs.grad[0, 1] == 0.0
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("d", [-1e4, 1e4])
def test_distant_policies_stay_finite(estimator, d):
    logprobs = torch.tensor([d], requires_grad=True)
    penalty = kl_penalty(
        logprobs, torch.zeros(1), torch.zeros(1), torch.ones(1), estimator=estimator
    )
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert torch.isfinite(logprobs.grad).all()
