"""Tells models apart by the state that their layers keep of earlier tokens."""

from __future__ import annotations

from typing import Any

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types whose state is keys and values, and that see no token of another sequence."""


def has_recurrent_layers(model_class: type, config: Any) -> bool:
    """Returns whether a layer keeps another state than keys and values, as linear attention does.

    Sequences of such a model cannot be packed: its state would pass from one to the next.

    model_class: a class of transformers, which is asked where the configuration names no layers.
    config: its configuration.
    """
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds:
        return bool(set(kinds) - ATTENTION)
    return bool(getattr(model_class, "_is_stateful", False))
