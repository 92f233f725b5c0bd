"""Computes log-probs and entropies of tokens without the (tokens x vocabulary) matrix of logits.

Logits are computed tile by tile in the forward pass, and again in the backward pass. Tiles are
square: for its size, a square tile moves the fewest hidden states, weights and gradients through
memory. On a CPU a tile is small enough to stay in the cache.

What is done to a tile besides matrix products is elementwise, and bound by memory. On a GPU it is
one kernel that reads the tile once, in the dtype of the matrix product (`logprobs_kernels`);
elsewhere a few operations of PyTorch (`PlainTiles`).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from services.common.errors import first_line

log = logging.getLogger(__name__)

CPU_TILE, GPU_TILE = 2_048, 8_192
"""Edge of a tile in tokens and in vocabulary entries.

One tile is 16 MiB in fp32 on a CPU and 128 MiB in bf16 on a GPU.
"""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    cap: float | None = None,
    bias: Tensor | None = None,
    entropy: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in nats, each (T,), of `targets` under softmax(logits / temperature).

    hidden: (T, H); weight: (V, H) and bias: (V,) of the output layer; targets: (T,) token ids.
    cap: x = logits / temperature is replaced by cap tanh(x / cap), which bounds it, if given.
    Computed and returned in fp32, or fp64 if the hidden states are. Entropies are 0 unless asked
    for. Gradients are exact and flow to hidden states, weight and bias.
    """
    size = tile or (GPU_TILE if hidden.is_cuda else CPU_TILE)
    scores: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, cap, entropy, size
    )
    return scores


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over the logits of T tokens, whose columns arrive tile by tile; (T,) each.

    A tile's function updates them in place.
    """

    largest: Tensor
    """Largest logit x so far."""
    total: Tensor
    """Sum of exp(x - largest)."""
    weighted: Tensor | None
    """Sum of exp(x - largest) x, for entropies; None without them."""
    target: Tensor
    """Logit of the target."""

    @classmethod
    def empty(cls, like: Tensor, *, entropy: bool) -> RowSums:
        """Returns the sums over no logits, for tokens of the shape (T,) of `like`."""
        zeros = torch.zeros_like
        weighted = zeros(like) if entropy else None
        return cls(torch.full_like(like, -torch.inf), zeros(like), weighted, zeros(like))

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-probs of the targets, log-sum-exps, entropies, which are 0 without sums)."""
        normalisers = self.total.log() + self.largest
        entropies = torch.zeros_like(normalisers)
        if self.weighted is not None:
            entropies = normalisers - self.weighted / self.total
        return self.target - normalisers, normalisers, entropies


@dataclass(frozen=True, slots=True)
class RowSlopes:
    """What the gradient of a row's logits needs beside them; (T,) each."""

    normalisers: Tensor
    """Log-sum-exps of the logits."""
    slope: Tensor
    """Gradient of the log-prob."""
    entropies: Tensor | None
    entropy_slope: Tensor | None
    """Gradient of the entropy; None without one, as the entropies."""


class TileFunctions(Protocol):
    """What is computed of a tile of raw logits, (t, v), which come from the output layer.

    The logits x are the raw ones over the temperature, then capped. targets: (t,) columns of the
    targets in the tile; those outside of [0, v) are in other tiles.
    """

    def add(
        self, raw: Tensor, targets: Tensor, temperature: float, cap: float | None, sums: RowSums
    ) -> None:
        """Adds a tile to the sums of its rows; may overwrite it."""

    def differentiate(
        self, raw: Tensor, targets: Tensor, temperature: float, cap: float | None, rows: RowSlopes
    ) -> Tensor:
        """Returns the gradient of the raw logits, (t, v); may overwrite them.

        d log p(y) / d x = onehot(y) - p and d H / d x = -p (log p + H).
        """


class PlainTiles:
    """The functions of a tile as operations of PyTorch, in fp32, or fp64 where the logits are."""

    def add(
        self, raw: Tensor, targets: Tensor, temperature: float, cap: float | None, sums: RowSums
    ) -> None:
        logits = _scaled(raw, temperature, cap)
        columns, inside = _columns(targets, logits)
        found = logits.gather(1, columns[:, None])[:, 0]
        sums.target.copy_(torch.where(inside, found, sums.target))
        largest = torch.maximum(sums.largest, logits.amax(dim=-1))
        scale = (sums.largest - largest).exp_()
        sums.largest.copy_(largest)
        if sums.weighted is None:
            exponentials = logits.sub_(largest[:, None]).exp_()
        else:
            exponentials = (logits - largest[:, None]).exp_()
            sums.weighted.mul_(scale).add_(torch.linalg.vecdot(exponentials, logits))
        sums.total.mul_(scale).add_(exponentials.sum(dim=-1))

    def differentiate(
        self, raw: Tensor, targets: Tensor, temperature: float, cap: float | None, rows: RowSlopes
    ) -> Tensor:
        logits = _scaled(raw, temperature, cap)
        # d cap tanh(x / cap) / d x = 1 - tanh(x / cap)^2
        cap_slope = None if cap is None else 1 - (logits / cap).square_()
        log_distribution = logits.sub_(rows.normalisers[:, None])
        distribution = log_distribution.exp()
        factor = rows.slope[:, None]
        if rows.entropies is not None and rows.entropy_slope is not None:
            factor = log_distribution.add_(rows.entropies[:, None])
            factor.mul_(rows.entropy_slope[:, None]).add_(rows.slope[:, None])
        gradient = distribution.mul_(factor).neg_()
        columns, inside = _columns(targets, gradient)
        every_row = torch.arange(len(gradient), device=gradient.device)
        gradient[every_row, columns] += torch.where(inside, rows.slope, 0.0)
        if cap_slope is not None:
            gradient.mul_(cap_slope)
        return gradient.div_(temperature)


def _scaled(raw: Tensor, temperature: float, cap: float | None) -> Tensor:
    """Returns the logits of raw ones, in fp32 or fp64; overwrites them if they are."""
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _columns(targets: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the targets' columns in a tile, some column for those outside, and which are inside.

    Without indexes of the rows inside, for which the host would wait for a GPU.
    """
    inside = (targets >= 0) & (targets < tile.shape[1])
    return targets.clamp(0, tile.shape[1] - 1), inside


PLAIN = PlainTiles()


def tile_functions(raw: Tensor) -> TileFunctions:
    """Returns the functions for tiles of the device and dtype of `raw`."""
    fused = _fused_tiles() if raw.is_cuda and raw.dtype != torch.float64 else None
    return PLAIN if fused is None else fused


@lru_cache
def _fused_tiles() -> TileFunctions | None:
    """Returns the fused kernels if they give the results of the plain operations on this device.

    Otherwise one line of the log says why not.
    """
    try:
        kernels = importlib.import_module("services.trainer.logprobs_kernels")
        fused: TileFunctions = kernels.FusedTiles()
        difference = _compare(fused, torch.device("cuda"))
    except Exception as error:  # noqa: BLE001 - a compiler of another project may raise anything
        problem = f"failed their trial ({first_line(error)})"
    else:
        if difference <= 1e-3:
            return fused
        problem = f"gave wrong results in their trial (off by {difference:.2g})"
    log.warning("log-probs: the Triton kernels %s; PyTorch's operations are used", problem)
    return None


def _compare(fused: TileFunctions, device: torch.device) -> float:
    """Returns the largest relative difference of a tile's results from the plain operations."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(40, 3_000, generator=generator).mul_(4).to(device)
    targets = torch.randint(-1_000, 4_000, (40,), generator=generator).to(device)
    values = torch.randn(3, 40, generator=generator).to(device)
    results = []
    for functions in (PLAIN, fused):
        sums = RowSums.empty(values[0], entropy=True)
        functions.add(raw.clone(), targets, 0.7, 30.0, sums)
        logprobs, normalisers, entropies = sums.results()
        rows = RowSlopes(normalisers, values[1], entropies, values[2])
        gradient = functions.differentiate(raw.clone(), targets, 0.7, 30.0, rows)
        results.append((logprobs, normalisers, entropies, gradient))
    return max(
        float((one.float() - other).abs().max() / other.abs().max())
        for other, one in zip(*results, strict=True)
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        cap: float | None,
        entropy: bool,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        normalisers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for tokens in _slices(len(hidden), tile):
            sums = RowSums.empty(logprobs[tokens], entropy=entropy)
            for vocabulary in _slices(len(weight), tile):
                raw = _raw_logits(hidden[tokens], weight, bias, vocabulary)
                columns = targets[tokens] - vocabulary.start
                tile_functions(raw).add(raw, columns, temperature, cap, sums)
            logprobs[tokens], normalisers[tokens], entropies[tokens] = sums.results()
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.cap, ctx.entropy, ctx.tile = temperature, cap, entropy, tile
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        # Gradients of sums have a stride of 0, which kernels do not expect.
        grad_logprobs = (
            torch.zeros_like(normalisers) if grad_logprobs is None else grad_logprobs.contiguous()
        )
        if grad_entropies is not None:
            grad_entropies = grad_entropies.contiguous()
        has_entropy = ctx.entropy and grad_entropies is not None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Gradients of the hidden states are sums over the vocabulary, in fp32. The gradient of a
        # slice of the weights is complete after the loop over the tokens, so that only one slice
        # of them is in fp32.
        dtype = normalisers.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for vocabulary in _slices(len(weight), ctx.tile):
            weight_slice = weight[vocabulary]
            of_slice = torch.zeros_like(weight_slice, dtype=dtype) if needs_weight else None
            for tokens in _slices(len(hidden), ctx.tile):
                raw = _raw_logits(hidden[tokens], weight, bias, vocabulary)
                rows = RowSlopes(
                    normalisers[tokens],
                    grad_logprobs[tokens],
                    entropies[tokens] if has_entropy else None,
                    None if grad_entropies is None or not has_entropy else grad_entropies[tokens],
                )
                columns = targets[tokens] - vocabulary.start
                gradient = tile_functions(raw).differentiate(
                    raw, columns, ctx.temperature, ctx.cap, rows
                )
                if grad_bias is not None:
                    grad_bias[vocabulary] += gradient.sum(dim=0, dtype=dtype)
                gradient = gradient.to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[tokens], gradient, weight_slice)
                if of_slice is not None:
                    _add_product(of_slice, gradient.t(), hidden[tokens])
            if grad_weight is not None and of_slice is not None:
                grad_weight[vocabulary] = of_slice
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: slice) -> Tensor:
    """Returns the output layer's logits of a tile, in the dtype of the matrix product."""
    return linear(hidden, weight[vocabulary], None if bias is None else bias[vocabulary])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Computes total += left @ right in place, summing in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
