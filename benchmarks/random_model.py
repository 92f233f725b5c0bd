"""A small random model, for benchmarks where only sizes matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def save_random_model(directory: Path, **options: Any) -> None:
    """Saves a random Qwen2 of width 256 with tied embeddings, from seed 0.

    options: of its configuration.
    """
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 1_024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    Qwen2ForCausalLM(Qwen2Config(**(defaults | options))).save_pretrained(directory)
