"""A model of a few thousand random weights, for tests that need some model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

END = 1


def micro_model(*, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Builds a Qwen3 of two layers; its weights are large enough for uneven distributions.

    changes: of its configuration.
    """
    options = {
        "vocab_size": 13,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": END,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**(options | changes)))
