"""The transformers engine against `model.generate`, in bfloat16 on a GPU, as in a run.

The tiny model answers Countdown prompts; the larger one has random weights and never ends a
response, so that dropping finished rows saves nothing. The first runs of a process load and choose
kernels, so `steady` has the medians from the tenth run on.
"""

from __future__ import annotations

import statistics
from functools import partial
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

STEADY_FROM = 10
"""First of the runs whose times count."""
TINY_REPEATS = STEADY_FROM + 2
REPEATS = 2
"""Runs of the larger model, too few to be steady: one pair of 64 x 8 x 256 took over a minute."""
CHECKED = 2
"""Prompts whose log-probs are compared with a forward pass of each response, which is slow."""


def measure(record: Record) -> None:
    dtype = torch.bfloat16 if GPU else torch.float32
    record.measure(
        {
            "tiny": partial(tiny, dtype, prompts=4 if record.toy else 128),
            "qwen3-0.6b": partial(random_weights, "toy", dtype, prompts=4, length=8)
            if record.toy
            else partial(random_weights, "qwen3-0.6b", dtype, prompts=8, length=32),
        }
    )


def tiny(dtype: torch.dtype, prompts: int) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        TINY_MODEL, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
    )
    model.eval().requires_grad_(False).to(DEVICE)
    token_ids = countdown_prompts(TINY_MODEL, prompts)
    result = contest(model, token_ids, length=32, name="tiny", repeats=TINY_REPEATS)
    return {**result, "steady": steady(result)}


def random_weights(shape: str, dtype: torch.dtype, prompts: int, length: int) -> dict[str, Any]:
    free()
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
    return contest(model, token_ids, length=length, name=shape, repeats=REPEATS)


def contest(
    model: Any, prompts: list[list[int]], *, length: int, name: str, repeats: int
) -> dict[str, Any]:
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=length, group_size=8)
    result = compete(Contest(model, prompts, sampling), repeats, Console(), name, checked=CHECKED)
    return {"prompts": len(prompts), "length": length, **result}


def steady(result: dict[str, Any]) -> dict[str, float]:
    """Returns the median tokens a second of both from the tenth run on, and their ratio."""
    engine, generate = (
        statistics.median(run["tokens"] / run["seconds"] for run in result[side][STEADY_FROM - 1 :])
        for side in ("engine", "generate")
    )
    return {
        "engine_tokens_per_s": engine,
        "generate_tokens_per_s": generate,
        "ratio": engine / generate,
    }
