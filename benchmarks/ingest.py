"""Measures durable ingest and reading of trajectories, beside the stores of other frameworks.

    make install-stores
    python -m benchmarks.ingest [--steps 8] [--out benchmarks/results/ingest.json]

A step has 256 groups of 8 responses with 512 tokens each, and is written in bundles of 64 groups,
as the collector does. In turns, each on the same Postgres and disk:

- **bapo**: `encode_groups` and the buffer service, which checks each response and answers when
  object and rows are durable; a step is read as the trainer reads its batch, digests included;
- **TransferQueue**, `SimpleStorage`: the memory of two processes, which is lost with them;
- **Trinity-RFT**, `SQLExperienceStorage`: pickled rows in Postgres.

All stores begin with Python objects of their own kind in memory, and end with tensors. The others
run in an environment of their own (`benchmarks.ingest_theirs`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bapo_core.config import config_from
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints, running_stack
from services.trainer.data import TrajectoryReader
from tests.integration.support.driver import create_run

GROUPS, SIZE, TOKENS, BUNDLE = 256, 8, 512, 64
STORES = Path(".stores")
THEIRS = ("transferqueue", "trinity")


def make_groups(uids: list[str], version: int, rng: np.random.Generator) -> list[TrajectoryGroup]:
    """Returns groups of random responses, as the collector has them before a delivery."""
    return [
        TrajectoryGroup(
            uid,
            rng.integers(2, 30_000, 64).tolist(),
            version,
            [
                TrajectoryResponse(
                    rng.integers(2, 150_000, TOKENS).tolist(),
                    (-rng.exponential(1.0, TOKENS)).astype(np.float32).tolist(),
                    float(correct),
                    "stop",
                    "1+2",
                    bool(correct),
                    {"answer": float(correct)},
                )
                for correct in rng.integers(0, 2, SIZE)
            ],
        )
        for uid in uids
    ]


def begin_run(stack: Endpoints, steps: int) -> BufferClient:
    """Begins a run whose batches are all groups of their step."""
    config = config_from(
        {
            "name": "ingest",
            "algorithm": "grpo",
            "steps": steps + 1,
            "task": {"options": {"template": "short"}, "train_prompts": 2_048},
            "rollout": {"prompts_per_step": GROUPS, "group_size": SIZE},
        }
    )
    client = BufferClient(stack.buffer_url, stack.token, run=config.name)
    create_run(client, config)
    client.begin_attempt()
    return client


def ours(stack: Endpoints, steps: int) -> Iterator[dict[str, float]]:
    """Yields the seconds of writing and of reading each step."""
    client, store = begin_run(stack, steps), ObjectStore(stack.object_store)
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        prompts = client.step_prompts(step)
        uids = [prompt.uid for prompt in prompts.prompts]
        groups = make_groups(uids, prompts.policy_version, rng)
        started = time.perf_counter()
        for first in range(0, GROUPS, BUNDLE):
            client.post_groups(step, "fresh", encode_groups(groups[first : first + BUNDLE]))
        write_s = time.perf_counter() - started
        started = time.perf_counter()
        batch = TrajectoryReader(store).batch(client.batch(step).members)
        read_s = time.perf_counter() - started
        if len(batch.tokens) != GROUPS * SIZE:
            raise RuntimeError(f"the batch has {len(batch.tokens)} responses")
        yield {"write_s": write_s, "read_s": read_s}
        client.commit(step, {})


class Theirs:
    """A process of the other environment, which writes and reads a step on each request."""

    def __init__(self, store: str, stack: Endpoints) -> None:
        url = stack.database_url.replace("postgresql+psycopg", "postgresql")
        arguments = [store, url, str(GROUPS), str(SIZE), str(TOKENS), str(BUNDLE)]
        self._process = subprocess.Popen(
            [str(STORES / "bin/python"), "-m", "benchmarks.ingest_theirs", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> dict[str, float]:
        """Returns the seconds of writing and of reading a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("step", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, float] = json.loads(line)
                return result
        raise RuntimeError(f"the store ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(stack: Endpoints, steps: int) -> dict[str, list[dict[str, float]]]:
    """Returns the seconds of each step by store; the stores take turns."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ("bapo", *THEIRS)}
    theirs = {name: Theirs(name, stack) for name in THEIRS}
    try:
        for step in ours(stack, steps):
            seconds["bapo"].append(step)
            for name, store in theirs.items():
                seconds[name].append(store.step())
    finally:
        for store in theirs.values():
            store.close()
    return seconds


def main() -> None:
    parser = make_parser(__doc__, "ingest")
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after one to warm up")
    arguments = parser.parse_args()
    if not (STORES / "bin/python").exists():
        sys.exit(f"there is no environment {STORES}; create it with: make install-stores")
    result: dict[str, Any] = {"machine": machine("torch"), "trajectories_per_step": GROUPS * SIZE}
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory), 0) as stack,
    ):
        for name, steps in measure(stack, arguments.steps + 1).items():
            rates = {
                action: GROUPS * SIZE / statistics.median(step[f"{action}_s"] for step in steps[1:])
                for action in ("write", "read")
            }
            result[name] = {"trajectories_per_s": rates, "steps": steps}
            Console().print(
                f"{name}: {rates['write']:,.0f} trajectories/s written, {rates['read']:,.0f} read",
                highlight=False,
            )
    report(result, arguments.out)


if __name__ == "__main__":
    main()
