"""Log-probs by tiles equal those from the full matrix of logits, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from services.trainer.logprobs import token_logprobs

T, H, V = 11, 6, 9


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = linear(hidden, weight, bias) / temperature
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(dim=-1)


def random_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=draw) for shape in ((T, H), (V, H), (V,))]
    hidden, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    return hidden, weight, bias, torch.randint(V, (T,), generator=draw)


@pytest.mark.parametrize("tile", [1, 2, 4, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_results_and_gradients_equal_those_of_the_full_matrix(
    tile: int, with_bias: bool, entropy: bool, cap: float | None
) -> None:
    results = []
    for tiled in (False, True):
        hidden, weight, bias, targets = random_inputs(torch.float64)
        used_bias = bias if with_bias else None
        if tiled:
            logprobs, entropies = token_logprobs(
                hidden,
                weight,
                targets,
                temperature=0.7,
                cap=cap,
                bias=used_bias,
                entropy=entropy,
                tile=tile,
            )
        else:
            logprobs, entropies = naive(hidden, weight, used_bias, targets, 0.7, cap)
            entropies = entropies if entropy else entropies * 0
        slope = torch.linspace(-1, 2, T, dtype=torch.float64)
        ((logprobs * slope).sum() + (entropies * slope.flip(0)).sum()).backward()
        gradients = [hidden.grad, weight.grad, *([bias.grad] if with_bias else [])]
        results.append([logprobs, entropies, *gradients])
    for full, by_tiles in zip(*results, strict=True):
        torch.testing.assert_close(full, by_tiles, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradients_are_exact(entropy: bool, cap: float | None) -> None:
    hidden, weight, bias, targets = random_inputs(torch.float64)

    def tiled(*inputs: Tensor) -> tuple[Tensor, ...]:
        scores = token_logprobs(
            *inputs[:2],
            targets,
            temperature=1.3,
            cap=cap,
            bias=inputs[2],
            entropy=entropy,
            tile=4,
        )
        return scores if entropy else scores[:1]

    assert torch.autograd.gradcheck(tiled, (hidden, weight, bias))


def test_sums_over_bfloat16_inputs_are_in_fp32() -> None:
    hidden, weight, _, targets = random_inputs(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, targets, entropy=True, tile=2)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    exact_hidden, exact_weight = (
        tensor.detach().float().requires_grad_() for tensor in (hidden, weight)
    )
    naive(exact_hidden, exact_weight, None, targets, 1.0)[0].sum().backward()
    for half, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert half.grad is not None
        torch.testing.assert_close(half.grad.float(), exact.grad, atol=0.03, rtol=0.03)


def test_only_inputs_that_require_it_get_a_gradient_and_no_tokens_are_accepted() -> None:
    hidden, weight, _, targets = random_inputs()
    logprobs, _ = token_logprobs(hidden.detach(), weight, targets)
    logprobs.sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    empty, _ = token_logprobs(hidden[:0], weight, targets[:0], entropy=True)
    empty.sum().backward()
    assert empty.shape == (0,)
