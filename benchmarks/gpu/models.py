"""Models with random weights, of the shapes that published figures are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bapo_core.config import RunConfig
from benchmarks.gpu.device import DEVICE, GPU
from services.trainer import attention
from services.trainer.attention_kernels import Needs
from services.trainer.lora import add_adapters
from services.trainer.memory import MemoryPlan, free_bytes, plan_memory
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from services.trainer.shard import (
    checkpoint_layers,
    choose_attention,
    compile_layers,
    compiles,
    shard,
    size_of,
)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151_936,
    },
    "qwen3-4b": {
        "hidden_size": 2_560,
        "intermediate_size": 9_728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151_936,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1_536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16_384,
    },
    "toy": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1_024,
    },
}
"""Sizes by name; the head's width is 128 unless given."""
SIZE_KEYS = tuple(key for key in SHAPES["small"] if key != "head_dim")
"""Configuration keys of a shape that every architecture has."""


def model_config(shape: str) -> Qwen3Config:
    """Returns the configuration of a shape, with tied embeddings and end token 1."""
    options: dict[str, Any] = {
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen3Config(**(options | SHAPES[shape]))


def other_models(shape: str) -> dict[str, Callable[[], Any]]:
    """Returns models of a shape that a GPU computes in other ways than Qwen3, by what they have."""
    size = model_config(shape).to_dict()
    options = {
        key: size[key] for key in ("pad_token_id", "eos_token_id", "bos_token_id", *SIZE_KEYS)
    }
    layers = size["num_hidden_layers"]
    return {
        "wide_heads": lambda: Qwen3ForCausalLM(Qwen3Config(**options, head_dim=512)),
        "windows": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **options,
                head_dim=256,
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            )
        ),
        "experts": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **options,
                moe_intermediate_size=size["intermediate_size"] // 4,
                num_experts=8,
                num_experts_per_tok=2,
            )
        ),
        "recurrent": lambda: Lfm2ForCausalLM(
            Lfm2Config(**options, layer_types=["conv", "full_attention"] * (layers // 2))
        ),
    }


def random_policy(shape: str, config: RunConfig, ranks: Ranks) -> tuple[Policy, MemoryPlan]:
    """Builds a policy on the device as `load_sharded` does, with weights drawn from seed 0.

    Returns also how a step fits the memory. On a GPU, frozen weights are in bfloat16, as those of a
    model whose files are.
    """
    available = free_bytes()
    torch.manual_seed(0)
    sizes = model_config(shape)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            sizes,
            dtype=torch.float32,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=False,
        )
    policy = Policy(model).eval()
    add_adapters(policy.model, config.lora, config.seed)
    choose_attention([attention_needs(sizes)], config.trainer.attention, ranks)
    frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
    for parameter in frozen if GPU else ():
        parameter.data = parameter.data.to(torch.bfloat16)
    size = size_of(policy.model, half_frozen=GPU and bool(frozen))
    memory = plan_memory(config, size, available=available)
    checkpoint_layers(policy, memory.checkpointing)
    if compiles(config.trainer, policy.model):
        compile_layers(policy)
    return shard(policy, ranks, offload=config.trainer.offload), memory


def attention_needs(sizes: Qwen3Config) -> Needs:
    """Returns what the layers of such a model need of an attention kernel."""
    head, heads, key_heads = sizes.head_dim, sizes.num_attention_heads, sizes.num_key_value_heads
    assert head is not None
    assert key_heads is not None
    return Needs(head, head, heads // key_heads, False, torch.float32)


def save_random_model(shape: str, directory: Path) -> None:
    """Saves a model of a shape in bfloat16, with weights drawn from seed 0."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = Qwen3ForCausalLM(model_config(shape))
    model.to(torch.bfloat16).save_pretrained(directory)
