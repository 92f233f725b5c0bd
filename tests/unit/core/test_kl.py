"""The KL estimators agree with worked examples (T6) and with the exact divergence."""

import math

import pytest
import torch

from bapo_core.kl import kl_penalty

ALPHA = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.double)
THETA = torch.tensor([[-0.7, -1.6, -0.5, -0.8]], dtype=torch.double)
MASK = torch.ones(1, 4, dtype=torch.bool)
ESTIMATORS = ["k1", "k2", "k3", "iw"]


@pytest.mark.parametrize(("estimator", "mean"), [("k3", 0.355485), ("iw", 2.997505)])
def test_t6_kl(estimator, mean):
    penalty = kl_penalty(THETA, ALPHA, MASK, estimator=estimator)
    assert penalty.mean().item() == pytest.approx(mean, abs=1e-6)


def test_k1_and_k2():
    assert kl_penalty(THETA, ALPHA, MASK, estimator="k1")[0].tolist() == pytest.approx(
        [0.3, 0.4, 0.0, 2.2]
    )
    assert kl_penalty(THETA, ALPHA, MASK, estimator="k2")[0].tolist() == pytest.approx(
        [0.045, 0.08, 0.0, 2.42]
    )


# Two policies over three tokens: an expectation is a sum, so unbiasedness can be checked exactly.
PI = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.double)
REF = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.double)
EXACT = (PI * (PI / REF).log()).sum().item()


@pytest.mark.parametrize(("estimator", "sampler"), [("k1", PI), ("k3", PI), ("iw", REF)])
def test_unbiased_for_its_sampler(estimator, sampler):
    penalty = kl_penalty(PI.log(), REF.log(), torch.ones(1, 3), estimator=estimator)
    assert (sampler * penalty).sum().item() == pytest.approx(EXACT)


def test_k3_is_biased_for_samples_of_the_reference():
    penalty = kl_penalty(PI.log(), REF.log(), torch.ones(1, 3), estimator="k3")
    assert (REF * penalty).sum().item() != pytest.approx(EXACT, rel=0.01)


def test_k3_is_at_most_ten():
    penalty = kl_penalty(torch.tensor([-40.0]), torch.tensor([0.0]), torch.ones(1), estimator="k3")
    assert penalty.tolist() == [10.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_penalty_where_the_policies_agree(estimator):
    assert kl_penalty(THETA, THETA, MASK, estimator=estimator).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_never_matter(estimator, poison):
    logprobs = torch.tensor([[-1.0, poison]], requires_grad=True)
    penalty = kl_penalty(
        logprobs, torch.tensor([[-2.0, 0.0]]), torch.tensor([[1, 0]]), estimator=estimator
    )
    penalty.sum().backward()
    assert penalty[0, 1] == 0.0
    assert logprobs.grad[0, 1] == 0.0
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("d", [-1e4, 1e4])
def test_distant_policies_stay_finite(estimator, d):
    logprobs = torch.tensor([d], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.zeros(1), torch.ones(1), estimator=estimator)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert torch.isfinite(logprobs.grad).all()
