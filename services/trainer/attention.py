"""Attention over packed sequences: each attends to itself alone, and no padding is computed.

Registered with transformers as the attention implementation `packed`. On a GPU it is one kernel for
sequences of all lengths (`attention_kernels`). On a CPU the sequences are padded for the time of
the attention alone, which is little padding where their lengths are similar.

Sequences may share the tokens of a prompt, which all other layers then compute once: what a token
of the prompt gets depends on the prompt alone. Attention computes it for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from bapo_core.errors import BapoError
from services.trainer.attention_kernels import Needs, kernel_for
from services.trainer.sequences import Sequences

IMPLEMENTATION = "packed"


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
    window = sliding_window if sliding_window and sliding_window < sequences.max_seqlen else None
    if sequences.images_in_window and not sliding_window:
        sequences = replace(sequences, images=None)
    needs = Needs(
        head_size=query.shape[-1],
        value_size=value.shape[-1],
        groups=query.shape[1] // key.shape[1],
        windowed=window is not None,
        dtype=query.dtype,
        masked=sequences.images is not None,
    )
    for observed in _observers:
        observed.windows.add(sliding_window or None)
        observed.kinds.add(replace(needs, windowed=False))
        if sliding_window:
            observed.kinds.add(replace(needs, windowed=True))
    output = kernel_for(needs, query.device).compute(
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


# ---- what a model asks of its attention ---------------------------------------------------------


@dataclass
class ObservedAttention:
    """What a model asked of its attention and of its masks."""

    kinds: set[Needs] = field(default_factory=set)
    """Kinds of attention of the layers; a layer with a window has one without it for sequences that
    are shorter."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that the attention was given, None for layers without one."""
    mask_windows: set[int | None] = field(default_factory=set)
    """Sliding windows of the masks that the model asked for."""


_observers: list[ObservedAttention] = []


@contextmanager
def observed_attention() -> Iterator[ObservedAttention]:
    """Yields what models ask of their attention while the context lasts.

    A model may apply its window through the mask alone, which packed attention does not get.
    """
    observed = ObservedAttention()
    _observers.append(observed)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _make_no_mask)
    try:
        yield observed
    finally:
        _observers.remove(observed)
        if not _observers:
            # Attention without a function for its masks gets none. With one, transformers would
            # look for packed sequences in the positions, for which the host waits for the GPU.
            del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[IMPLEMENTATION]


def _make_no_mask(*, local_size: int | None = None, **_: Any) -> None:
    """Makes no mask: the bounds of the sequences take its place."""
    for observed in _observers:
        observed.mask_windows.add(local_size or None)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
