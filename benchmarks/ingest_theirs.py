"""The stores of other frameworks, for `benchmarks.ingest`; runs in the environment `.stores`.

    python -m benchmarks.ingest_theirs STORE DATABASE_URL GROUPS SIZE TOKENS BUNDLE

Writes and reads a step for each line of standard input, and prints the seconds as JSON. It imports
nothing of bapo, which the environment does not have.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Step = Callable[[int], tuple[float, float]]
"""Writes and reads a step; returns the seconds of both."""


def columns(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Returns random responses."""
    return {
        "prompt": torch.randint(2, 30_000, (rows, 64), dtype=torch.int32),
        "tokens": torch.randint(2, 150_000, (rows, tokens), dtype=torch.int32),
        "logprobs": -torch.rand(rows, tokens),
        "reward": torch.randint(0, 2, (rows, 1)).float(),
    }


def bundles(rows: int, bundle: int) -> Iterator[slice]:
    for first in range(0, rows, bundle):
        yield slice(first, first + bundle)


def transferqueue(_: str, rows: int, tokens: int, bundle: int) -> Step:
    """SimpleStorage with its default of two storage processes."""
    import ray
    import transfer_queue
    from tensordict import TensorDict

    # Its actors reserve a CPU each, which this machine need not have.
    ray.init(num_cpus=8, log_to_driver=False, include_dashboard=False)
    transfer_queue.init()

    def run(step: int) -> tuple[float, float]:
        data = columns(rows, tokens)
        keys = [f"{step}-{row}" for row in range(rows)]
        started = time.perf_counter()
        for part in bundles(rows, bundle):
            fields = {name: values[part] for name, values in data.items()}
            transfer_queue.kv_batch_put(
                keys=keys[part],
                partition_id="train",
                fields=TensorDict(fields, batch_size=len(keys[part])),
            )
        written = time.perf_counter()
        read = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
        finished = time.perf_counter()
        assert torch.equal(torch.stack(list(read["tokens"].unbind())), data["tokens"])
        transfer_queue.kv_clear(keys=keys, partition_id="train")
        return written - started, finished - written

    return run


def trinity(url: str, rows: int, tokens: int, bundle: int) -> Step:
    """SQLExperienceStorage, called without Ray."""
    from trinity.buffer.storage.sql import SQLExperienceStorage
    from trinity.common.config import StorageConfig
    from trinity.common.experience import EID, Experience

    config = StorageConfig(name="ingest", path=url, schema_type="experience", batch_size=rows)
    storage = SQLExperienceStorage(config)
    loop = asyncio.new_event_loop()

    def run(step: int) -> tuple[float, float]:
        data = columns(rows, tokens)
        experiences: list[Any] = [
            Experience(
                eid=EID(batch=step, task=row // 8, run=row % 8),
                tokens=torch.cat([data["prompt"][row], data["tokens"][row]]),
                prompt_length=64,
                logprobs=data["logprobs"][row],
                reward=float(data["reward"][row]),
                info={"model_version": step},
            )
            for row in range(rows)
        ]
        started = time.perf_counter()
        for part in bundles(rows, bundle):
            loop.run_until_complete(storage.write(experiences[part]))
        written = time.perf_counter()
        read = loop.run_until_complete(storage.read())
        finished = time.perf_counter()
        assert len(read) == rows
        return written - started, finished - written

    return run


def main() -> None:
    store, url, *numbers = sys.argv[1:]
    groups, size, tokens, bundle = map(int, numbers)
    make = {"transferqueue": transferqueue, "trinity": trinity}[store]
    run = make(url, groups * size, tokens, bundle * size)
    for step, _ in enumerate(sys.stdin):
        write_s, read_s = run(step)
        print(json.dumps({"write_s": write_s, "read_s": read_s}), flush=True)


if __name__ == "__main__":
    main()
