"""Keys and values of a batch of samples, in buffers that are allocated once for whole sequences."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from services.model.layers import has_recurrent_layers

ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""States of layers of attention. Those of layers that are recurrent too are subclasses."""

LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""State of a recurrent layer; None in a transformers in which each model has its own."""


@dataclass(slots=True)
class Span:
    """The places of a cache that the next token step writes and reads, the same in all layers."""

    place: Tensor
    """(1,) int64: the place that the step writes, which is the number of places filled before."""
    visible: int = 0
    """Number of places that attention gets."""
    padded: bool = False
    """Whether `visible` may exceed the filled places, which the attention mask then hides.

    Nothing that the model is given then depends on `place` but by the tensor itself, so that a
    captured step is valid for every place below `visible`.
    """
    unread_mask: bool = False
    """Whether models must build their masks without reading the attention mask.

    Otherwise they read whether it hides anything, for which the host waits for a GPU.
    """

    @property
    def filled(self) -> int | Tensor:
        """Number of places filled before the step: on the device if `padded`."""
        return self.place[0] if self.padded else self.visible - 1


class PlacedLayer(DynamicLayer):
    """One layer's keys and values, (rows, heads, places, d) each.

    A batch of fewer rows uses the first rows of the buffers.
    """

    def __init__(self, span: Span, prompts: DynamicLayer, rows: int, places: int) -> None:
        """Allocates buffers for states like those of `prompts`."""
        super().__init__()  # type: ignore[no-untyped-call]
        assert prompts.keys is not None
        assert prompts.values is not None
        self._span = span
        self._buffers = [
            states.new_empty(rows, states.shape[1], places, states.shape[-1])
            for states in (prompts.keys, prompts.values)
        ]
        self.is_initialized = True

    def fill(self, prompts: DynamicLayer, prompt_of_row: Tensor, *, clear: bool) -> None:
        """Copies to each row the states of its prompt, (P, heads, L, d).

        clear: whether places not filled may become visible. Attention multiplies their values by
        zero, which does not hide what is not finite.
        """
        assert prompts.keys is not None
        assert prompts.values is not None
        rows = len(prompt_of_row)
        for buffer, states in zip(self._buffers, (prompts.keys, prompts.values), strict=True):
            filled = states.shape[2]
            buffer[:rows, :, :filled] = states.index_select(0, prompt_of_row)
            if clear:
                buffer[:rows, :, filled:] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        rows, visible = len(key_states), self._span.visible
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            if self._span.padded:
                buffer[:rows].index_copy_(2, self._span.place, states)
            else:  # a third of the time on a CPU
                buffer[:rows, :, visible - 1 : visible] = states
        keys, values = (buffer[:rows, :, :visible] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def keep(self, rows: Tensor, filled: int) -> None:
        """Moves `rows` to the front, in place: captured steps have the addresses of the buffers."""
        for buffer in self._buffers:
            buffer[: len(rows), :, :filled] = buffer[:, :, :filled].index_select(0, rows)

    def get_seq_length(self) -> Any:
        return self._span.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self._span.visible, 0

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether masks are built without reading the attention mask, as in compiled models."""
        return self._span.unread_mask


def empty_cache(model: Any) -> DynamicCache:
    """Returns a cache for prompts, whose attention layers keep all keys and values."""
    if not has_recurrent_layers(type(model), model.config):
        return DynamicCache()
    cache = DynamicCache(config=model.config.get_text_config())
    cache.layers = [
        DynamicLayer() if type(layer) in ATTENTION_LAYERS else layer  # type: ignore[no-untyped-call]
        for layer in cache.layers
    ]
    return cache


def cache_arguments(model: Any, cache: DynamicCache) -> dict[str, Any]:
    """Returns the arguments with which a model reads a cache and writes to it."""
    return {_cache_argument(model.__class__): cache, "use_cache": True}


@lru_cache
def _cache_argument(model: type[Any]) -> str:
    """Returns the name of the argument by which models of a class take their cache.

    It is `cache` from transformers 5.24 on, and `past_key_values` before, which is no longer
    accepted from 5.40 on.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def recurrent_states(layer: Any) -> list[Tensor]:
    """Returns the states of a `LinearAttentionLayer`."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]
