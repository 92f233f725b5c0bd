"""Measures a back-test: groups a minute for each set of rules, and the growth of its memory.

    python -m benchmarks.backtest [--steps 4000] [--out benchmarks/results/backtest.json]

The groups are synthetic, 256 prompts of 8 responses a step, and are read from Arrow streams as the
client gets them; the service's query is not part of it. Each set of rules is tested by itself, and
then all together.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np
import pyarrow as pa

from bapo_core.backtest import BackTest
from bapo_core.config import RunConfig, config_from
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.cli.recorded_groups import split_into_steps

PROMPTS, SIZE, POPULATION = 256, 8, 100_000
AT_ONCE = 200
"""Steps of a stream, as `recorded_groups.GROUPS_AT_ONCE` has them."""
RULES: dict[str, dict[str, Any]] = {
    "paper": {},
    "mixed groups of any age": {"replay": {"select": "mixed", "buffer": {"max_age": None}}},
    "grpo": {"algorithm": "grpo"},
}


def config(rules: dict[str, Any]) -> RunConfig:
    rollout = {"prompts_per_step": PROMPTS, "group_size": SIZE}
    task = {"train_prompts": POPULATION}
    return config_from({"steps": 1_000_000, "task": task, "rollout": rollout, **rules})


def stream(first: int, steps: int) -> bytes:
    """Returns the groups of these steps in the form that the service sends."""
    draw = np.random.default_rng(first)
    count = steps * PROMPTS
    prompts = np.concatenate(
        [draw.choice(POPULATION, PROMPTS, replace=False) for _ in range(steps)]
    )
    ability = np.random.default_rng(0).random(POPULATION)
    correct = draw.binomial(SIZE, ability[prompts])
    step = np.repeat(np.arange(first, first + steps), PROMPTS)
    table = pa.table(
        {
            "group_id": np.arange(count) + first * PROMPTS,
            "prompt_uid": [f"countdown:{number}" for number in prompts],
            "step": step,
            "correct": correct,
            "size": np.full(count, SIZE),
            "policy_version": np.maximum(1, step - step % 5),
            "lowest_reward": (correct == SIZE).astype(float),
            "highest_reward": (correct > 0).astype(float),
            "kind": ["fresh"] * count,
            "tokens": np.full(count, 4_000),
            "cut_off": np.zeros(count, np.int32),
            "position": prompts,
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def measure(configs: list[RunConfig], steps: int) -> dict[str, Any]:
    """Returns groups a minute of processor time, and the peak of the memory in MiB."""
    tests = [BackTest(each) for each in configs]
    seconds, peaks = 0.0, []
    for first in range(1, steps + 1, AT_ONCE):
        content = stream(first, AT_ONCE)
        started = time.process_time()
        for recorded in split_into_steps(content):
            for test in tests:
                test.add(recorded)
        seconds += time.process_time() - started
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    groups = steps * PROMPTS
    return {
        "groups": groups,
        "seconds": seconds,
        "groups_a_minute": 60 * groups / seconds,
        "peak_mib_after_the_first_steps": peaks[0],
        "peak_mib": peaks[-1],
    }


def main() -> None:
    parser = make_parser(__doc__, "backtest")
    parser.add_argument("--steps", type=int, default=4_000)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine("pyarrow")}
    for name, rules in RULES.items():
        result[name] = measure([config(rules)], arguments.steps)
    together = [config(rules) for rules in RULES.values()]
    result["all rules together"] = measure(together, arguments.steps)
    report(result, arguments.out)


if __name__ == "__main__":
    main()
