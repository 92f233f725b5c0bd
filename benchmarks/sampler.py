"""Measures the samplers on 1,000,000 prompts, with 10,000,000 posteriors.

    python -m benchmarks.sampler [--prompts 1000000] [--groups 10]
                                 [--out benchmarks/results/sampler.json]

Fills a database directly, with the posteriors that `groups` fresh groups of every prompt would have
left. Then, for each sampler:

- draws the 256 prompts of a step by the service's function on the real Postgres, another step in
  each call, so that nothing is cached;
- asks the real service for such prompts over HTTP, with their contents;
- makes and commits steps, which appends their posteriors.

The uniform sampler is the baseline: what an adaptive one takes beyond it is the reading of the
candidates' posteriors, the draws and the ranking.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from rich.console import Console
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from bapo_core.config import RunConfig, config_from
from benchmarks.buffer import BATCH, SIZE, percentile, trajectories
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api.client import BufferClient
from services.buffer.runs.runs import get_run
from services.buffer.steps.samplers import draw_round
from services.stack.stack import Endpoints, running_stack

RUN = "sampled"
CALLS, COMMITS = 200, 20
"""Measured calls and commits of each sampler; p99 is then the third largest call."""
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"kind": "uniform"},
    "mopps": {"kind": "mopps"},
    "dots": {"kind": "dots"},
    "mopps, 16 candidates a prompt": {"kind": "mopps", "candidates": 16},
}


def config(sampler: dict[str, Any], prompts: int) -> RunConfig:
    return config_from(
        {
            "name": RUN,
            "algorithm": "grpo",
            "steps": 100_000,
            "task": {"options": {"template": "short"}, "train_prompts": prompts},
            "rollout": {"prompts_per_step": BATCH, "group_size": SIZE},
            "sampler": sampler,
        }
    )


def fill(url: str, prompts: int, groups: int) -> int:
    """Fills a dataset and the posteriors of a run; returns the number of its committed steps."""
    steps = prompts * groups // BATCH
    with psycopg.connect(url, autocommit=True) as connection:
        # The rows are right by construction, and checking ten million foreign keys takes minutes.
        connection.execute("set session_replication_role = replica")
        connection.execute(
            "insert into prompt (dataset, uid, position, task, payload)"
            " select dataset, 'countdown:' || n, n, 'countdown',"
            " jsonb_build_object('nums', array[n %% 97, n %% 89, n %% 83], 'target', n %% 101)"
            " from (values ('train', %s), ('test', 8)) as sets (dataset, size),"
            " lateral generate_series(0, size - 1) as n",
            [prompts],
        )
        connection.execute("insert into dataset values ('train', %s), ('test', 8)", [prompts])
        connection.execute(
            "insert into run"
            " (name, config, train_dataset, test_datasets, status, current_step, attempt)"
            " values (%s, %s, 'train', '{\"test\": \"test\"}', 'running', %s, 1)",
            [RUN, config(SAMPLERS["uniform"], prompts).model_dump_json(), steps],
        )
        connection.execute(
            "insert into sampler_posterior (run_id, position, step, a, b)"
            " select run.id, position, 1 + (epoch * %s + position) / %s,"
            " 1 + random() * 40, 1 + random() * 40"
            " from run, generate_series(0, %s - 1) as position, generate_series(0, %s - 1) as epoch"
            " where epoch * %s + position < %s",
            [prompts, BATCH, prompts, groups, prompts, steps * BATCH],
        )
        # Autovacuum and the checkpointer would have done this in the hours that such a run takes.
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
    return steps


def select_sampler(url: str, sampler: dict[str, Any], prompts: int) -> None:
    """Gives the run another sampler; a filled database serves all of them."""
    stored = config(sampler, prompts).model_dump_json()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("update run set config = %s", [stored])


def measure_draws(stack: Endpoints, steps: int) -> dict[str, float]:
    """Returns latencies in ms of drawing the prompts of a step, and of asking for them by HTTP."""
    client = BufferClient(stack.buffer_url, stack.token, run=RUN, attempt=1)
    rng = random.Random(1)
    draws, calls = [], []
    engine = create_engine(stack.database_url)
    for _ in range(CALLS + 3):
        with Session(engine) as session:
            run = get_run(session, RUN)
            assert run.config.name == RUN  # Validating the configuration is not measured.
            step = rng.randint(1, steps)
            started = time.perf_counter()
            positions = draw_round(run, step, 0).positions
            draws.append((time.perf_counter() - started) * 1e3)
        assert len(set(positions)) == BATCH
    engine.dispose()
    for _ in range(CALLS + 3):
        step = rng.randint(1, steps)
        started = time.perf_counter()
        client.step_prompts(step)
        calls.append((time.perf_counter() - started) * 1e3)
    return {
        "draw_p50_ms": percentile(draws[3:], 0.5),
        "draw_p99_ms": percentile(draws[3:], 0.99),
        "prompts_p50_ms": percentile(calls[3:], 0.5),
        "prompts_p99_ms": percentile(calls[3:], 0.99),
    }


def measure_commits(stack: Endpoints) -> dict[str, float]:
    """Returns latencies in ms of delivering the groups of a step, and of its commit."""
    client = BufferClient(stack.buffer_url, stack.token, run=RUN, attempt=1)
    rng, delivered, committed = np.random.default_rng(2), [], []
    first = client.run_state().current_step + 1
    for step in range(first, first + COMMITS):
        prompts = client.step_prompts(step)
        uids = [prompt.uid for prompt in prompts.prompts]
        body = trajectories(uids, prompts.policy_version, 4, rng)
        started = time.perf_counter()
        client.post_groups(step, "fresh", body)
        delivered.append((time.perf_counter() - started) * 1e3)
        client.batch(step)
        started = time.perf_counter()
        client.commit(step, {"loss": 0.0})
        committed.append((time.perf_counter() - started) * 1e3)
    return {
        "deliver_p50_ms": percentile(delivered, 0.5),
        "commit_p50_ms": percentile(committed, 0.5),
    }


def measure(prompts: int, groups: int, console: Console) -> dict[str, Any]:
    result: dict[str, Any] = {
        "prompts": prompts,
        "machine": machine("sqlalchemy", "psycopg"),
        "prompts_per_step": BATCH,
    }
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory), 0) as stack,
    ):
        url = stack.database_url.replace("postgresql+psycopg", "postgresql")
        started = time.perf_counter()
        steps = fill(url, prompts, groups)
        result["posteriors"] = steps * BATCH
        console.print(f"filled in {time.perf_counter() - started:.0f} s")
        for name, sampler in SAMPLERS.items():
            select_sampler(url, sampler, prompts)
            result[name] = measure_draws(stack, steps) | measure_commits(stack)
            console.print(f"{name}: {result[name]}")
    return result


def main() -> None:
    parser = make_parser(__doc__, "sampler")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=10, help="groups of every prompt")
    arguments = parser.parse_args()
    result = measure(arguments.prompts, arguments.groups, Console())
    report(result, arguments.out)


if __name__ == "__main__":
    main()
