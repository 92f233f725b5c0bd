"""Training steps where a group's prompt is long, as long as a response, and short.

Every response carries its own copy of the prompt through the model. With G responses to a prompt of
P tokens and responses of R tokens, sharing it would save up to G (P + R) / (P + G R) of the time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.device import free
from benchmarks.gpu.models import model_config, random_policy
from benchmarks.gpu.record import Record
from benchmarks.gpu.steps import Steps, make_group, step_config
from services.trainer.ranks import init_distributed

GROUP = 8
LENGTHS = ((4_096, 1_024), (2_048, 2_048), (512, 4_096))
TOY_SHRINKAGE = 128
"""Lengths at toy size are this many times shorter."""
GROUPS = 4
MICROBATCH_TOKENS = 32_768
REPEATS = 3


def measure(record: Record) -> None:
    with init_distributed() as ranks:
        record.measure(
            {
                f"{prompt}:{response}": partial(
                    measure_lengths, prompt, response, record.toy, ranks
                )
                for prompt, response in LENGTHS
            }
        )


def measure_lengths(prompt: int, response: int, toy: bool, ranks: Any) -> dict[str, Any]:
    free()
    name = "toy" if toy else "qwen3-0.6b"
    if toy:
        prompt, response = prompt // TOY_SHRINKAGE, response // TOY_SHRINKAGE
    draw = np.random.default_rng(0)
    vocabulary = model_config(name).vocab_size
    groups = [make_group(draw, prompt, [response] * GROUP, vocabulary) for _ in range(GROUPS)]
    config = step_config(groups, microbatch_tokens=64 if toy else MICROBATCH_TOKENS)
    policy, memory = random_policy(name, config, ranks)
    steps = Steps(config, policy, groups, memory)
    ideal = GROUP * (prompt + response) / (prompt + GROUP * response)
    return {**steps.measure(REPEATS), "plan": str(memory), "ideal_speed_up_of_sharing": ideal}
