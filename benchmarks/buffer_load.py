"""Loads the buffer service with 64 runs and 8 dashboards at once, for ten minutes.

    python -m benchmarks.buffer_load [--runs 64] [--dashboards 8] [--minutes 10] [--pace 10]

Each run plays a collector and a trainer, which make a step of 64 groups x 8 responses x 128 tokens
every `pace` seconds: prompts, groups, batch, commit, and a checkpoint every fifth step. A dashboard
asks for a run's state, steps, bins, prompts and buffers every two seconds, with If-None-Match. One
run without dashboards is measured first, which tells the effect of the load from that of the
machine. Any error fails the benchmark.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import httpx
import numpy as np
from rich.console import Console

from bapo_core.config import RunConfig, config_from
from benchmarks.buffer import SIZE, percentile, service_memory, trajectories
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from benchmarks.runs import begin_run
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints, running_stack

GROUPS, TOKENS = 64, 128
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class CallTimer:
    """Collects the latencies of calls by name, in milliseconds, and their errors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.times: dict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []

    def time(
        self,
        name: str,
        call: Callable[Parameters, Result],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Calls `call` and records its latency."""
        started = time.perf_counter()
        result = call(*arguments, **options)
        with self._lock:
            self.times[name].append((time.perf_counter() - started) * 1e3)
        return result

    def summary(self) -> dict[str, Any]:
        return {
            name: {
                "calls": len(times),
                "p50_ms": percentile(times, 0.5),
                "p99_ms": percentile(times, 0.99),
                "max_ms": max(times),
            }
            for name, times in sorted(self.times.items())
        }


def config(name: str) -> RunConfig:
    return config_from(
        {
            "name": name,
            "steps": 100_000,
            "task": {"options": {"template": "short"}, "train_prompts": 2000, "test_prompts": 8},
            "rollout": {"prompts_per_step": GROUPS, "group_size": SIZE},
        }
    )


def create(stack: Endpoints, name: str) -> BufferClient:
    client = BufferClient(stack.buffer_url, stack.token, run=name)
    begin_run(client, config(name))
    return client


def train(client: BufferClient, timer: CallTimer, until: float, pace: float, seed: int) -> None:
    """Plays the collector and the trainer of one run, step after step."""
    rng = np.random.default_rng(seed)
    begins = time.monotonic() + pace * random.Random(seed).random()
    step = 0
    while (begins := begins + pace) < until:
        time.sleep(max(0.0, begins - time.monotonic()))
        step += 1
        make_step(client, timer, step, rng)


def make_step(client: BufferClient, timer: CallTimer, step: int, rng: np.random.Generator) -> None:
    kinds: list[wire.Kind] = ["fresh"]
    if config(client.run).schedule.reevaluates_at(step):
        kinds.append("reevaluation")
    for kind in kinds:
        prompts = timer.time("prompts", client.step_prompts, step, kind)
        uids = [prompt.uid for prompt in prompts.prompts]
        if uids:
            body = trajectories(uids, prompts.policy_version, TOKENS, rng)
            timer.time("groups", client.post_groups, step, kind, body)
    timer.time("batch", client.batch, step)
    timer.time("commit", client.commit, step, {"loss": 0.5, "entropy": 1.0})
    if step % 5 == 0:
        timer.time("checkpoint", client.record_checkpoint, step, "c" * 64)


def watch(stack: Endpoints, name: str, timer: CallTimer, until: float) -> None:
    """Plays a dashboard that shows one run."""
    tags: dict[str, str] = {}
    paths = ("", "/steps?points=500", "/difficulty/bins", "/prompts?order=hardest", "/buffers/hard")
    headers = {"Authorization": f"Bearer {stack.token}"}
    with httpx.Client(base_url=stack.buffer_url, headers=headers, timeout=30) as client:
        while time.monotonic() < until:
            for path in paths:
                condition = {"If-None-Match": tags[path]} if path in tags else {}
                url = f"/v1/runs/{name}{path}"
                answer = timer.time("dashboard", client.get, url, headers=condition)
                if answer.status_code not in (200, 304):
                    timer.errors.append(f"{url}: {answer.status_code}")
                tags[path] = answer.headers.get("etag", "")
            time.sleep(2)


def load(
    stack: Endpoints, prefix: str, runs: int, dashboards: int, minutes: float, pace: float
) -> Any:
    """Returns the latencies of all calls with so many runs and dashboards at the same time."""
    clients = [create(stack, f"{prefix}-{n}") for n in range(runs)]
    timer = CallTimer()
    until = time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(runs + dashboards) as pool:
        jobs = [
            pool.submit(train, client, timer, until, pace, n) for n, client in enumerate(clients)
        ]
        jobs += [
            pool.submit(watch, stack, f"{prefix}-{n % runs}", timer, until)
            for n in range(dashboards)
        ]
        for job in jobs:
            job.result()
    if timer.errors:
        raise RuntimeError(f"{len(timer.errors)} errors, the first: {timer.errors[0]}")
    return {"runs": runs, "dashboards": dashboards, "calls": timer.summary()}


def main() -> None:
    parser = make_parser(__doc__, "buffer_load")
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--dashboards", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--pace", type=float, default=10, help="seconds between the steps of a run")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine("sqlalchemy", "psycopg"),
        "minutes": arguments.minutes,
        "pace_s": arguments.pace,
    }
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory), 0) as stack,
    ):
        result["alone"] = load(stack, "alone", 1, 0, arguments.minutes / 10, 1.0)
        console.print("alone: done")
        result["memory_before_mib"] = service_memory(stack)
        result["together"] = load(
            stack, "run", arguments.runs, arguments.dashboards, arguments.minutes, arguments.pace
        )
        result["memory_after_mib"] = service_memory(stack)
    report(result, arguments.out)


if __name__ == "__main__":
    main()
