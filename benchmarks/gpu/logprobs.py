"""Log-probs of many tokens over a large vocabulary, forward and backward, three ways.

`ours` is the trainer's (tiles of logits), with and without the entropy; `liger` is Liger's fused
linear cross-entropy, which has the gradient ready in the forward pass, for one weight a token that
is known then; it sums the output layer's gradient in bfloat16, or in fp32 as ours does; `whole`
materialises the matrix of logits in fp32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu.device import DEVICE, GPU, free, peak_memory, seconds_of
from benchmarks.gpu.record import Record, spread
from services.trainer.logprobs import token_logprobs

TOKENS, VOCABULARY, WIDTH = 16_384, 151_936, 1_024
REPEATS = 5
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the sum of the log-probs of targets (T,), from hidden (T, H) and weight (V, H)."""


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets)[0].sum()


def ours_with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs, entropies = token_logprobs(hidden, weight, targets, entropy=True)
    return logprobs.sum() + 0.001 * entropies.sum()


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs = torch.log_softmax(linear(hidden, weight).float(), dim=-1)
    return logprobs.gather(1, targets[:, None]).sum()


def liger(
    hidden: Tensor, weight: Tensor, targets: Tensor, accumulate: torch.dtype | None = None
) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=accumulate)
    total: Tensor = loss(weight, hidden, targets)
    return -total


WAYS: dict[str, Way] = {
    "ours": ours,
    "ours_with_entropy": ours_with_entropy,
    "liger": liger,
    "liger_fp32": partial(liger, accumulate=torch.float32),
    "whole": whole,
}


def measure(record: Record) -> None:
    sizes = (64, 512, 32) if record.toy else (TOKENS, VOCABULARY, WIDTH)
    expected: tuple[Tensor, Tensor] | None = None
    for name, way in WAYS.items():
        if name.startswith("liger") and not (GPU and importlib.util.find_spec("liger_kernel")):
            record.add(name, "not run: needs a GPU and the package liger-kernel")
            continue
        result, gradient = measure_way(way, sizes)
        expected = expected or (result.pop("sum"), gradient)
        record.add(
            name,
            {
                **{key: value for key, value in result.items() if key != "sum"},
                # Relative to ours; the entropy's share of the gradient is part of that difference.
                "gradient_difference": float((gradient - expected[1]).norm() / expected[1].norm()),
            },
        )
        free()


def measure_way(way: Way, sizes: tuple[int, int, int]) -> tuple[dict[str, Any], Tensor]:
    """Returns seconds and memory of a forward and backward pass, and the gradient of `hidden`."""
    tokens, vocabulary, width = sizes
    torch.manual_seed(0)
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, width, **kind).requires_grad_()  # type: ignore[call-overload]
    weight = torch.randn(vocabulary, width, **kind).mul_(0.02).requires_grad_()  # type: ignore[call-overload]
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    total = torch.zeros(())

    def both() -> None:
        nonlocal total
        hidden.grad = weight.grad = None
        total = way(hidden, weight, targets)
        total.backward()  # type: ignore[no-untyped-call]

    seconds = seconds_of(both, repeats=REPEATS, warm_up=2)
    hidden.grad = weight.grad = None
    with peak_memory() as memory:
        both()
    assert hidden.grad is not None
    result = {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "width": width,
        "seconds": spread(seconds),
        "memory": memory.report(),
        "sum": total.detach(),
    }
    return result, hidden.grad.float()
