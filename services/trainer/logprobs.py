"""Computes log-probs and entropies of tokens without the (tokens x vocabulary) matrix of logits.

Logits are computed tile by tile in the forward pass, and again in the backward pass. Tiles are
square: for its size, a square tile moves the fewest hidden states, weights and gradients through
memory. On a CPU a tile is small enough to stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CPU_TILE, GPU_TILE = 2_048, 8_192
"""Edge of a tile in tokens and in vocabulary entries.

One fp32 tile is 16 MiB on a CPU and 256 MiB on a GPU; two or three live at a time.
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
        tiles = _Tiles(hidden, weight, bias, targets, temperature, cap, tile)
        logprobs = hidden.new_empty(len(hidden), dtype=tiles.dtype)
        normalisers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for tokens in tiles.token_slices():
            log_sum_exp = _RunningLogSumExp(logprobs[tokens], entropy)
            for vocabulary in tiles.vocabulary_slices():
                logits = tiles.logits(tokens, vocabulary)
                rows, columns = tiles.target_entries(tokens, vocabulary)
                logprobs[tokens].index_copy_(0, rows, logits[rows, columns])
                log_sum_exp.add(logits)
            normalisers[tokens], entropies[tokens] = log_sum_exp.result()
        logprobs -= normalisers
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.cap, ctx.entropy, ctx.tile = temperature, cap, entropy, tile
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalisers)
        tiles = _Tiles(hidden, weight, bias, targets, ctx.temperature, ctx.cap, ctx.tile)
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=tiles.dtype) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for tokens in tiles.token_slices():
            slope = grad_logprobs[tokens, None]
            for vocabulary in tiles.vocabulary_slices():
                logits = tiles.logits(tokens, vocabulary)
                # d cap tanh(x / cap) / d x = 1 - tanh(x / cap)^2
                cap_slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square_()
                log_distribution = logits.sub_(normalisers[tokens, None])
                distribution = log_distribution.exp()
                # d log p(y) / d logits = onehot(y) - p;  d H / d logits = -p (log p + H)
                factor = slope
                if ctx.entropy and grad_entropies is not None:
                    factor = log_distribution.add_(entropies[tokens, None])
                    factor.mul_(grad_entropies[tokens, None]).add_(slope)
                grad_logits = distribution.mul_(factor).neg_()
                rows, columns = tiles.target_entries(tokens, vocabulary)
                grad_logits[rows, columns] += slope[rows, 0]
                if cap_slope is not None:
                    grad_logits.mul_(cap_slope)
                grad_logits.div_(ctx.temperature)
                if grad_bias is not None:
                    grad_bias[vocabulary] += grad_logits.sum(dim=0)
                grad_logits = grad_logits.to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[tokens], grad_logits, weight[vocabulary])
                if grad_weight is not None:
                    _add_product(grad_weight[vocabulary], grad_logits.t(), hidden[tokens])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


class _Tiles:
    """The logits of T tokens over V vocabulary entries, in tiles of at most `size` x `size`."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        cap: float | None,
        size: int,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._targets, self._temperature, self._size = targets, temperature, size
        self._cap = cap
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        """Dtype of logits, sums and results."""

    def token_slices(self) -> Iterator[slice]:
        return _slices(len(self._hidden), self._size)

    def vocabulary_slices(self) -> Iterator[slice]:
        return _slices(len(self._weight), self._size)

    def logits(self, tokens: slice, vocabulary: slice) -> Tensor:
        """Logits of a tile, divided by the temperature, and capped."""
        bias = None if self._bias is None else self._bias[vocabulary]
        logits = linear(self._hidden[tokens], self._weight[vocabulary], bias).to(self.dtype)
        if self._temperature != 1.0:
            logits.div_(self._temperature)
        return logits if self._cap is None else logits.div_(self._cap).tanh_().mul_(self._cap)

    def target_entries(self, tokens: slice, vocabulary: slice) -> tuple[Tensor, Tensor]:
        """(rows, columns) of the tile's entries that are targets."""
        targets = self._targets[tokens]
        rows = ((targets >= vocabulary.start) & (targets < vocabulary.stop)).nonzero()[:, 0]
        return rows, targets[rows] - vocabulary.start


class _RunningLogSumExp:
    """Log-sum-exp of rows whose columns arrive tile by tile, and the entropy of their softmax."""

    def __init__(self, like: Tensor, entropy: bool) -> None:
        self._max = torch.full_like(like, -torch.inf)
        self._sum = torch.zeros_like(like)
        """Sum of exp(logit - max)."""
        self._weighted = torch.zeros_like(like) if entropy else None
        """Sum of exp(logit - max) times logit."""

    def add(self, logits: Tensor) -> None:
        """Adds a tile; overwrites `logits` unless the entropy was asked for."""
        new_max = torch.maximum(self._max, logits.amax(dim=-1))
        scale = (self._max - new_max).exp_()
        self._max = new_max
        if self._weighted is None:
            exponentials = logits.sub_(new_max[:, None]).exp_()
        else:
            exponentials = (logits - new_max[:, None]).exp_()
            self._weighted.mul_(scale).add_(torch.linalg.vecdot(exponentials, logits))
        self._sum.mul_(scale).add_(exponentials.sum(dim=-1))

    def result(self) -> tuple[Tensor, Tensor]:
        """(log-sum-exp, entropies); these are 0 unless they were asked for."""
        normaliser = self._sum.log() + self._max
        if self._weighted is None:
            return normaliser, torch.zeros_like(normaliser)
        return normaliser, normaliser - self._weighted / self._sum


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Computes total += left @ right in place, summing in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
