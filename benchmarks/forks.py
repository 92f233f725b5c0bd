"""Measures forks of a run with 10,000,000 groups: the time to make one, and what it stores.

    python -m benchmarks.forks [--prompts 100000] [--steps 39000] [--forks 120]
                               [--out benchmarks/results/forks.json]

Fills a database as `benchmarks.buffer` does, then asks the real service over HTTP for forks at
steps drawn at random, one at a time, half of them with other data rules. The bytes of all tables
are read before and after. Then the first attempt of a fork begins, which derives the difficulty of
the prompts of its past. The ratio is to the creation of a run without a past, in the same service.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from benchmarks.buffer import Filled, fill, percentile
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints, running_stack

RULES: dict[str, Any] = {"replay": {"select": "off"}, "fresh": {"filter": "none"}}
NEWEST_SHARE = 0.5
"""Share of the run from which the steps of forks are drawn: with a checkpoint every fifth step."""


def add_artifacts(url: str, run: Filled) -> None:
    """Records weights for every sync and a checkpoint after every fifth step, without objects."""
    with psycopg.connect(url) as connection:
        connection.execute(
            """
            insert into weight_version (run_id, version, uri, manifest_digest, status)
            select run.id, version, 'runs/' || name || '/weights/' || version, repeat('0', 64),
                'published'
            from run, generate_series(1, current_step + 1) as version where name = %s
            """,
            [run.name],
        )
        connection.execute(
            """
            insert into checkpoint (run_id, step, uri, manifest_digest)
            select run.id, step, 'runs/' || name || '/checkpoints/' || step, repeat('0', 64)
            from run, generate_series(5, current_step, 5) as step where name = %s
            """,
            [run.name],
        )


def size_of_tables(url: str) -> int:
    """Returns the bytes of all tables with their indexes."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("vacuum")
        row = connection.execute(
            "select sum(pg_total_relation_size(relid))::bigint from pg_stat_user_tables"
        ).fetchone()
    assert row is not None
    return int(row[0])


def create_runs(client: BufferClient, run: Filled, count: int) -> list[float]:
    """Creates runs without a past; returns the milliseconds of each."""
    times = []
    for number in range(count):
        name = f"new-{number}"
        config = run.config.model_copy(update={"name": name}).model_dump(mode="json")
        request = wire.RunCreate(
            name=name,
            config=config,
            train_dataset=f"{run.name}-train",
            test_datasets={"test": f"{run.name}-test"},
        )
        started = time.perf_counter()
        client.create_run(request)
        times.append(1000 * (time.perf_counter() - started))
    return times


def make_forks(client: BufferClient, run: Filled, count: int) -> list[float]:
    """Makes forks at random steps; returns the milliseconds of each."""
    draw = random.Random(0)
    times = []
    for number in range(count):
        step = draw.randint(int(run.steps * NEWEST_SHARE), run.steps - run.steps % 5)
        values = RULES if number % 2 else {}
        request = wire.ForkRequest(name=f"fork-{number}", step=step, values=values)
        started = time.perf_counter()
        client.fork_run(request)
        times.append(1000 * (time.perf_counter() - started))
    return times


def measure(endpoints: Endpoints, run: Filled, forks: int) -> dict[str, Any]:
    url = endpoints.database_url.replace("postgresql+psycopg", "postgresql")
    console = Console(stderr=True)
    fill(url, run, console)
    add_artifacts(url, run)
    client = BufferClient(endpoints.buffer_url, endpoints.token, run=run.name)
    new = create_runs(client, run, forks)
    before = size_of_tables(url)
    made = make_forks(client, run, forks)
    after = size_of_tables(url)
    first = BufferClient(endpoints.buffer_url, endpoints.token, run="fork-0")
    started = time.perf_counter()
    first.begin_attempt()
    attempt = time.perf_counter() - started
    return {
        "prompts": run.prompts,
        "groups": run.steps * 256,
        "new_run_p50_ms": percentile(new, 0.5),
        "new_run_p99_ms": percentile(new, 0.99),
        "fork_p50_ms": percentile(made, 0.5),
        "fork_p99_ms": percentile(made, 0.99),
        "fork_to_new_run_p50": percentile(made, 0.5) / percentile(new, 0.5),
        "bytes": before,
        "bytes_a_fork": (after - before) / forks,
        "share_a_fork": (after - before) / forks / before,
        "first_attempt_s": attempt,
    }


def main() -> None:
    parser = make_parser(__doc__, "forks")
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=39_000)
    parser.add_argument("--forks", type=int, default=120)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, running_stack(Path(home), 0) as endpoints:
        run = Filled("past", arguments.prompts, arguments.steps)
        result = measure(endpoints, run, arguments.forks)
    report({"machine": machine(), **result}, arguments.out)


if __name__ == "__main__":
    main()
