"""Training steps where a group's prompt is long, as long as a response, and short.

Every response carries its own copy of the prompt through the model. With G responses to a prompt of
P tokens and responses of R tokens, sharing it would save up to G (P + R) / (P + G R) of the time.
"""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.device import free
from benchmarks.gpu.models import model_config, random_policy
from benchmarks.gpu.record import Record
from benchmarks.gpu.steps import Steps, make_group, step_config
from services.trainer.ranks import init_distributed

GROUP = 8
LENGTHS = ((4_096, 1_024), (2_048, 2_048), (512, 4_096))
TOY_LENGTHS = ((32, 8), (16, 16), (4, 32))
GROUPS = 4
MICROBATCH_TOKENS = 32_768
REPEATS = 3


def measure(record: Record) -> None:
    name = "toy" if record.toy else "qwen3-0.6b"
    vocabulary = model_config(name).vocab_size
    with init_distributed() as ranks:
        for prompt, response in TOY_LENGTHS if record.toy else LENGTHS:
            draw = np.random.default_rng(0)
            groups = [
                make_group(draw, prompt, [response] * GROUP, vocabulary) for _ in range(GROUPS)
            ]
            config = step_config(groups, microbatch_tokens=64 if record.toy else MICROBATCH_TOKENS)
            steps = Steps(config, random_policy(name, config, ranks), groups)
            ideal = GROUP * (prompt + response) / (prompt + GROUP * response)
            record.add(
                f"{prompt}:{response}",
                {**steps.measure(REPEATS), "ideal_speed_up_of_sharing": ideal},
            )
            del steps
            free()
