"""Training steps of Qwen3 shapes on long rows, as prime-rl publishes them for one H100.

The published runs (prime-rl's benchmarks/baselines, January 2026) take two micro-batches of one row
of random tokens each, with compiled layers, full recomputation and fp32 master weights, and no
scoring pass: compare `update`. Their tokens a second of a full fine-tuning count the time between
two steps; their own time of a step of the first row gives 16.4k tokens a second, not 11.9k. Their
attention is FlashAttention 3; a result names ours. Their memory is what the allocator reserves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._dynamo
from transformers import Qwen3Config

from benchmarks.gpu.device import free, profiled
from benchmarks.gpu.models import model_config, random_policy
from benchmarks.gpu.record import Record
from benchmarks.gpu.steps import Steps, make_group, step_config
from services.trainer.attention_kernels import current_choices, forget_choices
from services.trainer.policy import Policy
from services.trainer.ranks import init_distributed
from services.trainer.speed import FROZEN, PEAK_TFLOPS, TRAINING

ROWS = 2
REPEATS = 3
PEAK_FLOPS = PEAK_TFLOPS["H200"] * 1e12


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    row: int
    """Tokens of a row."""
    lora_rank: int = 0
    recompute: bool = True
    compiled: bool = False
    published: tuple[float, float, float] | None = None
    """Tokens a second, MFU in percent and peak GiB (reserved) of prime-rl on one H100."""
    brief: bool = False
    """Whether two repetitions without a profile have to do: each takes half a minute."""

    @property
    def name(self) -> str:
        parts = [self.shape, str(self.row), f"lora{self.lora_rank}" if self.lora_rank else ""]
        parts += ["" if self.recompute else "kept", "compiled" if self.compiled else ""]
        return "-".join(filter(None, parts))


CASES = (
    Case("qwen3-0.6b", 16_384, published=(11_900, 11.1, 12.5)),
    Case("qwen3-4b", 16_384, lora_rank=16, published=(6_230, 21.7, 23.3)),
    Case("qwen3-0.6b", 16_384, recompute=False),
    Case("qwen3-0.6b", 65_536, published=(10_150, 26.8, 19.6), brief=True),
    Case("qwen3-0.6b", 16_384, compiled=True, published=(11_900, 11.1, 12.5)),
    Case("qwen3-4b", 16_384, lora_rank=16, compiled=True, published=(6_230, 21.7, 23.3)),
    Case("qwen3-0.6b", 65_536, compiled=True, published=(10_150, 26.8, 19.6), brief=True),
)


def measure(record: Record) -> None:
    # Otherwise, layers that are compiled too often run without compilation, silently.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    with init_distributed() as ranks:
        record.measure(
            {
                case.name: partial(
                    measure_case,
                    shrink(case) if record.toy else case,
                    ranks,
                )
                for case in CASES
            }
        )


def shrink(case: Case) -> Case:
    """Returns the case at toy size, without compilation, which the part `correctness` tries."""
    return replace(case, shape="toy", row=case.row // 256, compiled=False, published=None)


def measure_case(case: Case, ranks: Any) -> dict[str, Any]:
    """Measures updates of the case."""
    free()
    forget_choices()
    shape = model_config(case.shape)
    draw = np.random.default_rng(0)
    # One prompt token: the whole row but that is trained on, as in the published runs.
    groups = [make_group(draw, 1, [case.row - 1] * ROWS, shape.vocab_size)]
    config = step_config(
        groups,
        microbatch_tokens=case.row,
        lora={"rank": case.lora_rank, "alpha": 32},
        trainer={
            "gradient_checkpointing": "full" if case.recompute else "none",
            "compile": case.compiled,
        },
    )
    policy, memory = random_policy(case.shape, config, ranks)
    steps = Steps(config, policy, groups, memory)
    result = steps.measure(2 if case.brief else REPEATS, warm_up=2 if case.compiled else 1)
    rate = result["tokens_per_s"]["update"]
    result |= {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "mfu_published_formula": rate * published_flops(shape, policy, case.row) / PEAK_FLOPS,
        "mfu_ours": rate * our_flops(policy) / PEAK_FLOPS,
        "published": case.published,
        "attention": [choice.kernel.name for choice in current_choices()],
        # Compare with `memory`: the part is the formula's check.
        "predicted_gib": None if memory.predicted is None else memory.predicted / (1 << 30),
    }
    if not case.compiled and not case.brief:
        result["profile"] = profiled(steps.step)
    return result


def published_flops(shape: Qwen3Config, policy: Policy, row: int) -> float:
    """Returns FLOPs a token by prime-rl's count (`trainer/perf.py`).

    6 for each weight of a matrix product, or 4 if it is frozen and 6 for each of its adapters, and
    12 x layers x width x row for attention: causality and recomputation are not counted.
    """
    width, head = shape.hidden_size, shape.head_dim
    heads, key_heads = shape.num_attention_heads, shape.num_key_value_heads
    assert head is not None
    assert key_heads is not None
    layer = width * head * (2 * heads + 2 * key_heads) + 3 * width * shape.intermediate_size
    weights = shape.num_hidden_layers * layer + shape.vocab_size * width
    adapters = sum(
        parameter.numel() for name, parameter in policy.named_parameters() if ".lora_" in name
    )
    per_weight = 4 if adapters else 6
    attention = 12 * shape.num_hidden_layers * width * row
    return per_weight * weights + 6 * adapters + attention


def our_flops(policy: Policy) -> float:
    """Returns FLOPs a token of an update by `services.trainer.speed`: attention is not counted."""
    return float(
        sum(
            parameter.numel() * (TRAINING if parameter.requires_grad else FROZEN)
            for parameter in policy.parameters()
        )
    )
