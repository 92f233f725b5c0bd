"""Attention over packed sequences: each attends to itself alone, and no padding is computed.

Registered with transformers as the attention implementation `packed`. On a GPU it is one kernel for
sequences of all lengths. On a CPU the sequences are padded for the time of the attention alone,
which is little padding where their lengths are similar.

Sequences may share the tokens of a prompt, which all other layers then compute once: what a token
of the prompt gets depends on the prompt alone. Attention computes it for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from bapo_core.errors import BapoError

IMPLEMENTATION = "packed"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Data types that the variable-length kernel takes."""
MAX_HEAD_SIZE = 256
"""Largest size of a head that it takes."""


@dataclass(frozen=True)
class Sequences:
    """Bounds of n sequences of S tokens: i is in `cu_seqlens[i]` to `cu_seqlens[i + 1]`.

    The T packed tokens are the same S tokens, or fewer if sequences share prompts.
    """

    cu_seqlens: Tensor
    """(n + 1,) int32 cumulative sequence lengths, from 0 on."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    sources: Tensor | None = None
    """(S,) index of the packed token that each token is; None if none is shared, so that S = T."""
    kept: Tensor | None = None
    """(T,) index among the S tokens of the first one that each packed token is; None as above."""
    images: Tensor | None = None
    """(T,) number of the image that each packed token belongs to, and 0 for text, if the tokens of
    an image attend to all tokens of this image; otherwise None."""
    images_in_window: bool = False
    """Whether they do so within a sliding window alone, and not in layers without one."""

    @classmethod
    def of(cls, lengths: Tensor) -> Sequences:
        """Builds the bounds of sequences of these `lengths`, (n,)."""
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        return cls(cu_seqlens, int(lengths.max()))

    @cached_property
    def sequence_ids(self) -> Tensor:
        """(S,) index of the sequence that each token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def position_ids(self) -> Tensor:
        """(S,) position of each token in its sequence, from 0 on."""
        tokens = torch.arange(len(self.sequence_ids), device=self.sequence_ids.device)
        return tokens - self.cu_seqlens[:-1].long()[self.sequence_ids]

    @cached_property
    def pad_indices(self) -> Tensor:
        """(n, max_seqlen) indexes into the packed tokens that lay them out as padded sequences.

        Padding is the last token of the sequence again.
        """
        starts = self.cu_seqlens[:-1, None].long()
        ends = self.cu_seqlens[1:, None].long()
        columns = torch.arange(self.max_seqlen, device=starts.device)
        return self.packed_indices(torch.minimum(starts + columns, ends - 1))

    @cached_property
    def unpad_indices(self) -> Tensor:
        """(T,) indexes into the flattened padded sequences that pack them again."""
        return self.keep(self.sequence_ids * self.max_seqlen + self.position_ids)

    def share_prompts(self, prompt_lengths: Tensor, prompts: Tensor) -> Sequences:
        """Returns these sequences with every prompt packed once, where its first sequence begins.

        prompt_lengths: (n,) tokens with which the sequences begin. prompts: (n,) number of each
        sequence's prompt; those of one number begin with the same tokens.
        """
        numbers, prompt = torch.unique(prompts, return_inverse=True)
        if len(numbers) == len(prompts):
            return self
        sequence = torch.arange(len(prompts))
        first = sequence.new_full((len(numbers),), len(prompts))
        owner = first.scatter_reduce(0, prompt, sequence, "amin")[prompt]
        shared = (owner != sequence)[self.sequence_ids]
        shared &= self.position_ids < prompt_lengths[self.sequence_ids]
        packed = (~shared).cumsum(0) - 1
        owned = self.cu_seqlens[:-1].long()[owner][self.sequence_ids] + self.position_ids
        return replace(
            self,
            sources=torch.where(shared, packed[torch.where(shared, owned, 0)], packed),
            kept=torch.nonzero(~shared)[:, 0],
        )

    def keep(self, values: Tensor) -> Tensor:
        """Returns values (S, ...) of the sequences' tokens as (T, ...) of the packed ones."""
        return values if self.kept is None else values[self.kept]

    def spread(self, values: Tensor) -> Tensor:
        """Returns values (T, ...) of the packed tokens as (S, ...) of the sequences'."""
        return values if self.sources is None else values[self.sources]

    def packed_indices(self, tokens: Tensor) -> Tensor:
        """Returns the indexes among the packed tokens of these of the S tokens."""
        return tokens if self.sources is None else self.sources[tokens]

    def to(self, device: torch.device) -> Sequences:
        """Returns a copy on `device`."""
        return Sequences(
            self.cu_seqlens.to(device),
            self.max_seqlen,
            None if self.sources is None else self.sources.to(device),
            None if self.kept is None else self.kept.to(device),
            None if self.images is None else self.images.to(device),
            self.images_in_window,
        )


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
    """Computes causal attention within each sequence, or within each image in both directions.

    query: (1, heads, T, D); key and value: (1, key heads, T, D). Returns (1, T, heads, D).
    Raises `BapoError` for a model whose attention is of another kind.
    """
    _refuse_other_kinds(module, attention_mask, dropout, rest)
    for windows in _observers:
        windows.of_attention.add(sliding_window or None)
    window = sliding_window if sliding_window and sliding_window < sequences.max_seqlen else None
    if sequences.images_in_window and not sliding_window:
        sequences = replace(sequences, images=None)
    variable = query.is_cuda and _fits_varlen(query, value, sequences)
    kernel = _varlen if variable else _padded
    output = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sequences,
        scaling,
        window,
    )
    return output[None], None


def _refuse_other_kinds(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, rest: dict[str, Any]
) -> None:
    needs = {
        "its own attention mask": attention_mask is not None,
        "dropout": dropout > 0 and module.training,
        "soft-capped attention": rest.get("softcap") is not None,
        "attention sinks": rest.get("s_aux") is not None,
        "attention that is not causal": rest.get("is_causal") is False,
    }
    for kind, needed in needs.items():
        if needed:
            raise BapoError(
                f"{type(module).__name__} needs {kind}, which the trainer's packed attention does "
                "not support; choose another model"
            )


def _fits_varlen(query: Tensor, value: Tensor, sequences: Sequences) -> bool:
    """Whether the variable-length kernel, FlashAttention 2, computes this attention.

    It takes half precision, no masks, and one size of all heads, a multiple of 8. The global heads
    of Gemma 4 have 512, and those of DeepSeek-V3 192 in keys and 128 in values.
    """
    size = query.shape[-1]
    return (
        query.dtype in KERNEL_DTYPES
        and sequences.images is None
        and value.shape[-1] == size <= MAX_HEAD_SIZE
        and size % 8 == 0
    )


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Pads the sequences for the attention alone; inputs and output are (T, heads, D)."""
    query, key, value = (
        packed[sequences.pad_indices].transpose(1, 2) for packed in (query, key, value)
    )
    mask = None
    if window is not None or sequences.images is not None:
        distance = torch.arange(sequences.max_seqlen, device=query.device)
        distance = distance[:, None] - distance[None, :]
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
        if sequences.images is not None:
            image = sequences.images[sequences.pad_indices]
            within = (image[:, :, None] == image[:, None, :]) & (image > 0)[:, :, None]
            if window is not None and sequences.images_in_window:
                within &= distance < window
            mask = (mask | within)[:, None]
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (mask is not None or query.is_cuda):
        # On GPUs, the fast kernel for what `_varlen` does not take has no groups of heads.
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)[sequences.unpad_indices]


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Runs one kernel for all sequences; inputs and output are (T, heads, D)."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (sequences.spread(packed) for packed in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    output = varlen_attn(
        query,
        key,
        value,
        sequences.cu_seqlens,
        sequences.cu_seqlens,
        sequences.max_seqlen,
        sequences.max_seqlen,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )
    assert isinstance(output, Tensor)
    return sequences.keep(output)


# ---- models whose windows do not reach the attention --------------------------------------------


@dataclass
class Windows:
    """Sliding windows of a model's layers, None for layers without one."""

    of_masks: set[int | None] = field(default_factory=set)
    """Those of the masks that the model asked for."""
    of_attention: set[int | None] = field(default_factory=set)
    """Those that the attention was given."""


_observers: list[Windows] = []


@contextmanager
def observed_windows() -> Iterator[Windows]:
    """Yields the windows that models use while the context lasts.

    A model may apply its window through the mask alone, which packed attention does not get.
    """
    windows = Windows()
    _observers.append(windows)
    try:
        yield windows
    finally:
        _observers.remove(windows)


def _make_no_mask(*, local_size: int | None = None, **_: Any) -> None:
    """Makes no mask: the bounds of the sequences take its place."""
    for windows in _observers:
        windows.of_masks.add(local_size or None)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _make_no_mask)
