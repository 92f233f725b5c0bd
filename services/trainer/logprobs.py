"""Log-probs and entropies of tokens without the (tokens x vocabulary) matrix.

It is made tile by tile, forward and again backward. A tile is as wide as it is high: then the least
of hidden states, weights and their gradients passes through memory for its size; and on a CPU it is
small enough to stay in the cache while it is worked on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CPU_TILE, GPU_TILE = 2_048, 8_192
"""Tokens and words of a tile: 16 and 256 MiB in fp32, of which two or three are held."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    entropy: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in nats, each (T,), of `targets` under softmax(logits / temperature).

    hidden: (T, H); weight: (V, H) and bias: (V,) of the output layer; targets: (T,). Computed and
    returned in fp32, or fp64 for hidden states of that. Entropies are 0 unless asked for.
    Gradients are exact and flow to hidden states, weight and bias.
    """
    size = tile or (GPU_TILE if hidden.is_cuda else CPU_TILE)
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, entropy, size
    )
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        made = _Tiles(hidden, weight, bias, targets, temperature, tile)
        logprobs = hidden.new_empty(len(hidden), dtype=made.precise)
        normalisers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for tokens in made.tokens():
            total = _RunningSum(logprobs[tokens], entropy)
            for words in made.words():
                logits = made.logits(tokens, words)
                rows, columns = made.chosen(tokens, words)
                logprobs[tokens].index_copy_(0, rows, logits[rows, columns])
                total.add(logits)
            normalisers[tokens], entropies[tokens] = total.result()
        logprobs -= normalisers
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.entropy, ctx.tile = temperature, entropy, tile
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies = gradients
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalisers)
        made = _Tiles(hidden, weight, bias, targets, ctx.temperature, ctx.tile)
        to_hidden, to_weight, to_bias = (
            torch.zeros_like(each, dtype=made.precise) if wanted else None
            for each, wanted in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for tokens in made.tokens():
            slope = of_logprobs[tokens, None]
            for words in made.words():
                log_distribution = made.logits(tokens, words).sub_(normalisers[tokens, None])
                distribution = log_distribution.exp()
                # d log p(y) / d logits = onehot(y) - p;  d H / d logits = -p (log p + H)
                factor = slope
                if ctx.entropy and of_entropies is not None:
                    factor = log_distribution.add_(entropies[tokens, None])
                    factor.mul_(of_entropies[tokens, None]).add_(slope)
                to_logits = distribution.mul_(factor).neg_()
                rows, columns = made.chosen(tokens, words)
                to_logits[rows, columns] += slope[rows, 0]
                to_logits.div_(ctx.temperature)
                if to_bias is not None:
                    to_bias[words] += to_logits.sum(dim=0)
                to_logits = to_logits.to(hidden.dtype)
                if to_hidden is not None:
                    _add_product(to_hidden[tokens], to_logits, weight[words])
                if to_weight is not None:
                    _add_product(to_weight[words], to_logits.t(), hidden[tokens])
        return (
            None if to_hidden is None else to_hidden.to(hidden.dtype),
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *(None,) * 4,
        )


class _Tiles:
    """The logits of an output layer, a tile at a time."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        size: int,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._targets, self._temperature, self._size = targets, temperature, size
        self.precise = torch.promote_types(hidden.dtype, torch.float32)

    def tokens(self) -> Iterator[slice]:
        return _parts(len(self._hidden), self._size)

    def words(self) -> Iterator[slice]:
        return _parts(len(self._weight), self._size)

    def logits(self, tokens: slice, words: slice) -> Tensor:
        bias = None if self._bias is None else self._bias[words]
        found = linear(self._hidden[tokens], self._weight[words], bias).to(self.precise)
        return found if self._temperature == 1.0 else found.div_(self._temperature)

    def chosen(self, tokens: slice, words: slice) -> tuple[Tensor, Tensor]:
        """(rows, columns) of the tile where a token's target is."""
        targets = self._targets[tokens]
        rows = ((targets >= words.start) & (targets < words.stop)).nonzero()[:, 0]
        return rows, targets[rows] - words.start


class _RunningSum:
    """log sum exp of rows that come in parts, and the entropy of their softmax."""

    def __init__(self, like: Tensor, entropy: bool) -> None:
        self._largest = torch.full_like(like, -torch.inf)
        self._sum = torch.zeros_like(like)
        self._weighted = torch.zeros_like(like) if entropy else None
        """Sum of exp(logit) times logit, by the same scale as the sum."""

    def add(self, logits: Tensor) -> None:
        """Overwrites `logits` unless the entropy is wanted."""
        largest = torch.maximum(self._largest, logits.amax(dim=-1))
        scale = (self._largest - largest).exp_()
        self._largest = largest
        if self._weighted is None:
            shares = logits.sub_(largest[:, None]).exp_()
        else:
            shares = (logits - largest[:, None]).exp_()
            self._weighted.mul_(scale).add_(torch.linalg.vecdot(shares, logits))
        self._sum.mul_(scale).add_(shares.sum(dim=-1))

    def result(self) -> tuple[Tensor, Tensor]:
        """(log sum exp, entropies), these 0 if they were not wanted."""
        normaliser = self._sum.log() + self._largest
        if self._weighted is None:
            return normaliser, torch.zeros_like(normaliser)
        return normaliser, normaliser - self._weighted / self._sum


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, added up in the precision of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _parts(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
