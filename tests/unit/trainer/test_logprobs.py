"""Chunked log-probs: what the whole matrix would give, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from services.trainer.logprobs import token_logprobs

T, H, V = 11, 6, 9


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    distribution = torch.log_softmax(linear(hidden, weight, bias) / temperature, dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(dim=-1)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=draw) for shape in ((T, H), (V, H), (V,))]
    hidden, weight, bias = (each.to(dtype).requires_grad_() for each in made)
    return hidden, weight, bias, torch.randint(V, (T,), generator=draw)


@pytest.mark.parametrize("tile", [1, 2, 4, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_same_as_from_the_whole_matrix(tile: int, with_bias: bool, entropy: bool) -> None:
    found = []
    for chunked in (False, True):
        hidden, weight, bias, targets = drawn(torch.float64)
        used = bias if with_bias else None
        if chunked:
            logprobs, entropies = token_logprobs(
                hidden,
                weight,
                targets,
                temperature=0.7,
                bias=used,
                entropy=entropy,
                tile=tile,
            )
        else:
            logprobs, entropies = naive(hidden, weight, used, targets, 0.7)
            entropies = entropies if entropy else entropies * 0
        slope = torch.linspace(-1, 2, T, dtype=torch.float64)
        ((logprobs * slope).sum() + (entropies * slope.flip(0)).sum()).backward()
        gradients = [hidden.grad, weight.grad, *([bias.grad] if with_bias else [])]
        found.append([logprobs, entropies, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_exact(entropy: bool) -> None:
    hidden, weight, bias, targets = drawn(torch.float64)

    def chunked(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = token_logprobs(
            *inputs[:2],
            targets,
            temperature=1.3,
            bias=inputs[2],
            entropy=entropy,
            tile=4,
        )
        return found if entropy else found[:1]

    assert torch.autograd.gradcheck(chunked, (hidden, weight, bias))


def test_half_precision_is_summed_in_single() -> None:
    hidden, weight, _, targets = drawn(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, targets, entropy=True, tile=2)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    exact_hidden, exact_weight = (
        each.detach().float().requires_grad_() for each in (hidden, weight)
    )
    naive(exact_hidden, exact_weight, None, targets, 1.0)[0].sum().backward()
    for half, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert half.grad is not None
        torch.testing.assert_close(half.grad.float(), exact.grad, atol=0.03, rtol=0.03)


def test_only_what_is_wanted_gets_a_gradient_and_no_token_is_fine() -> None:
    hidden, weight, _, targets = drawn()
    logprobs, _ = token_logprobs(hidden.detach(), weight, targets)
    logprobs.sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    empty, _ = token_logprobs(hidden[:0], weight, targets[:0], entropy=True)
    empty.sum().backward()
    assert empty.shape == (0,)
