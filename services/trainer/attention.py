"""Attention over packed sequences: none sees another, and nothing is computed on padding.

Registered with transformers as the attention implementation `packed`. On a GPU it is one kernel for
sequences of all lengths. On a CPU the sequences are laid side by side for the time of the attention
alone, which is little padding where their lengths are similar.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from bapo_core.errors import BapoError

IMPLEMENTATION = "packed"


@dataclass(frozen=True)
class Sequences:
    """Where sequences lie in a row of tokens: the i-th from `starts[i]` to `starts[i + 1]`."""

    starts: Tensor
    """(n + 1,) int32"""
    longest: int

    @classmethod
    def of(cls, lengths: Tensor) -> Sequences:
        """lengths: (n,)"""
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = lengths.cumsum(0)
        return cls(starts, int(lengths.max()))

    @cached_property
    def row(self) -> Tensor:
        """(tokens,) which sequence each token is of."""
        lengths = self.starts.diff().long()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def position(self) -> Tensor:
        """(tokens,) each token's place in its sequence."""
        tokens = torch.arange(len(self.row), device=self.row.device)
        return tokens - self.starts[:-1].long()[self.row]

    @cached_property
    def places(self) -> Tensor:
        """(n, longest) of each sequence's tokens, side by side; what is beyond its end is its
        last token again."""
        starts = self.starts[:-1, None].long()
        ends = self.starts[1:, None].long()
        return torch.minimum(starts + torch.arange(self.longest, device=starts.device), ends - 1)

    @cached_property
    def back(self) -> Tensor:
        """(tokens,) where each token is in the flattened `places`."""
        return self.row * self.longest + self.position


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence.

    query: (1, heads, T, D); key and value: (1, key heads, T, D). Returns (1, T, heads, D).
    Raises `BapoError` for a kind of attention that is not this.
    """
    _refuse_other_kinds(module, attention_mask, dropout, rest)
    window = sliding_window if sliding_window and sliding_window < sequences.longest else None
    # The kernel is for half precision.
    kernel = _varlen if query.is_cuda and query.dtype.itemsize == 2 else _side_by_side
    mixed = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sequences,
        scaling,
        window,
    )
    return mixed[None], None


def _refuse_other_kinds(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, rest: dict[str, Any]
) -> None:
    wanted = {
        "an attention mask of its own": attention_mask is not None,
        "dropout": dropout > 0 and module.training,
        "soft-capped attention": rest.get("softcap") is not None,
        "attention sinks": rest.get("s_aux") is not None,
        "attention that is not causal": rest.get("is_causal") is False,
    }
    for kind, found in wanted.items():
        if found:
            raise BapoError(
                f"{type(module).__name__} wants {kind}, which the trainer's packed attention does "
                "not have; choose another model"
            )


def _side_by_side(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """All (T, heads, D)."""
    query, key, value = (each[sequences.places].transpose(1, 2) for each in (query, key, value))
    mask = None
    if window is not None:
        distance = torch.arange(sequences.longest, device=query.device)
        distance = distance[:, None] - distance[None, :]
        mask = (distance >= 0) & (distance < window)
    mixed = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).flatten(0, 1)[sequences.back]


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """All (T, heads, D); one kernel for all sequences."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    mixed = varlen_attn(
        query,
        key,
        value,
        sequences.starts,
        sequences.starts,
        sequences.longest,
        sequences.longest,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )
    assert isinstance(mixed, Tensor)
    return mixed


AttentionInterface.register(IMPLEMENTATION, packed_attention)
# The sequences say who sees whom: there is no mask to make.
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, lambda *_, **__: None)
