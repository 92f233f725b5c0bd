"""Log-probs by tiles equal those from the full matrix of logits, gradients included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from services.trainer import logprobs
from services.trainer.logprobs import PlainTiles, token_logprobs

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


def test_the_kernels_of_a_gpu_compute_what_plain_operations_do() -> None:
    """In Triton's interpreter: with and without cap and entropy, in fp32 and bfloat16."""
    program = Path(__file__).with_name("kernels_program.py")
    root = program.parents[3]
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
        capture_output=True,
        text=True,
    )
    differences: dict[str, float] = json.loads(done.stdout)
    assert len(differences) == 4 * 2 * 2 * 2
    for name, difference in differences.items():
        # A gradient in bfloat16 is rounded to 8 bits, half of which may fall on either side.
        assert difference < (1e-2 if "bfloat16" in name else 1e-4), name


def test_kernels_that_fail_their_trial_are_replaced_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(PlainTiles):
        def differentiate(self, raw: Tensor, *arguments: Any) -> Tensor:
            return super().differentiate(raw, *arguments) * 1.1

    def broken(name: str) -> Any:
        raise RuntimeError("no compiler\nmore")

    def wrong(name: str) -> Any:
        return SimpleNamespace(FusedTiles=Wrong)

    monkeypatch.setattr(logprobs, "_compare", partial(_compare_on_cpu, logprobs._compare))
    for importer, message in ((broken, "no compiler"), (wrong, "gave wrong results")):
        logprobs._fused_tiles.cache_clear()
        monkeypatch.setattr(logprobs.importlib, "import_module", importer)
        assert logprobs._fused_tiles() is None
        assert message in caplog.records[-1].getMessage()
        assert len(caplog.records[-1].getMessage().splitlines()) == 1
    logprobs._fused_tiles.cache_clear()
    monkeypatch.setattr(
        logprobs.importlib, "import_module", lambda _: SimpleNamespace(FusedTiles=PlainTiles)
    )
    assert isinstance(logprobs._fused_tiles(), PlainTiles)
    logprobs._fused_tiles.cache_clear()


def _compare_on_cpu(compare: Any, functions: Any, device: torch.device) -> float:
    difference: float = compare(functions, torch.device("cpu"))
    return difference
