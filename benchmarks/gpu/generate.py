"""The transformers engine against `model.generate`, in bfloat16 on a GPU, as in a run.

The tiny model answers Countdown prompts; the larger one has random weights and never ends a
response, so that dropping finished rows saves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from benchmarks.engine import NEVER, TEMPERATURE, BiasedHead, Contest, compete, countdown_prompts
from benchmarks.gpu.device import DEVICE, GPU, free
from benchmarks.gpu.models import model_config
from benchmarks.gpu.record import Record
from services.model.resolve import TINY_MODEL
from services.rollout.api.wire import Sampling

REPEATS = 3
CHECKED = 2
"""Prompts whose log-probs are compared with a forward pass of each response, which is slow."""


def measure(record: Record) -> None:
    dtype = torch.bfloat16 if GPU else torch.float32
    record.add("tiny", tiny(dtype, prompts=4 if record.toy else 128))
    free()
    shape, prompts, length = ("toy", 4, 8) if record.toy else ("qwen3-0.6b", 64, 256)
    record.add(shape, random_weights(shape, dtype, prompts, length))


def tiny(dtype: torch.dtype, prompts: int) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        TINY_MODEL, dtype=dtype, attn_implementation="sdpa"
    )
    model.eval().requires_grad_(False).to(DEVICE)
    return contest(model, countdown_prompts(TINY_MODEL, prompts), length=32, name="tiny")


def random_weights(shape: str, dtype: torch.dtype, prompts: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = Qwen3ForCausalLM(model_config(shape))
    model.eval().requires_grad_(False).to(dtype)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.lm_head = BiasedHead(model.lm_head, model.config.eos_token_id, NEVER)
    draw = torch.Generator().manual_seed(0)
    shortest, longest = length // 4, length // 2
    lengths = torch.randint(shortest, longest + 1, (prompts,), generator=draw).tolist()
    vocabulary = model.config.vocab_size
    token_ids = [torch.randint(2, vocabulary, (n,), generator=draw).tolist() for n in lengths]
    return contest(model, token_ids, length=length, name=shape)


def contest(model: Any, prompts: list[list[int]], *, length: int, name: str) -> dict[str, Any]:
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=length, group_size=8)
    result = compete(Contest(model, prompts, sampling), REPEATS, Console(), name, checked=CHECKED)
    return {"prompts": len(prompts), "length": length, **result}
