"""Loads the buffer service with the heartbeats of a run's rollout replicas.

    python -m benchmarks.fleet [--replicas 128] [--seconds 30]

Each replica waits for new target weights and reports its state every two seconds, as
services/rollout/replica.py does. The latencies are those of the reports; a collector takes a
replica for lost after ten seconds without one. One replica alone is measured first, which tells
the effect of the number from that of the machine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.buffer import percentile
from benchmarks.buffer_load import create
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api.client import LONG_POLL_S
from services.rollout.replica import REPORT_INTERVAL_S
from services.stack.stack import Endpoints, running_stack

CONNECTING_S = 10.0
"""Seconds until all replicas are connected, whose reports are not counted."""
KEEP_ALIVE_S = 2.5
"""Seconds for which a connection is kept, less than uvicorn's, so that none is closed in use."""


async def play_replica(
    client: httpx.AsyncClient, run: str, number: int, begins: float, ends: float
) -> list[float]:
    """Plays one replica until `ends`, and returns the latencies of its reports in milliseconds.

    Counts reports from `begins` on. Raises `httpx.HTTPStatusError` for an error of the service.
    """
    latencies: list[float] = []
    report = {"url": f"http://replica-{number}:8000", "state": "serving", "loaded_version": 0}

    async def report_state() -> None:
        # Replicas do not start at the same moment.
        await asyncio.sleep(number * 0.618 % 1 * REPORT_INTERVAL_S)
        while time.monotonic() < ends:
            started = time.monotonic()
            answer = await client.put(f"/v1/runs/{run}/replicas/replica-{number}", json=report)
            answer.raise_for_status()
            if started >= begins:
                latencies.append((time.monotonic() - started) * 1e3)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def follow_target() -> None:
        known = ""
        while time.monotonic() < ends:
            answer = await client.get(
                f"/v1/runs/{run}/target", params={"known": known, "wait": LONG_POLL_S}
            )
            known = answer.raise_for_status().json()["tag"]

    await asyncio.gather(report_state(), follow_target())
    return latencies


async def measure(stack: Endpoints, run: str, replicas: int, seconds: float) -> dict[str, Any]:
    """Returns the latencies of the reports of so many replicas of one run."""
    async with httpx.AsyncClient(
        base_url=stack.buffer_url,
        headers={"Authorization": f"Bearer {stack.token}"},
        timeout=120,
        limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
    ) as client:
        begins = time.monotonic() + CONNECTING_S
        played = await asyncio.gather(
            *(play_replica(client, run, n, begins, begins + seconds) for n in range(replicas))
        )
    latencies = [latency for replica in played for latency in replica]
    return {
        "replicas": replicas,
        "reports_per_second": len(latencies) / seconds,
        "p50_ms": percentile(latencies, 0.5),
        "p99_ms": percentile(latencies, 0.99),
        "max_ms": max(latencies),
    }


def main() -> None:
    parser = make_parser(__doc__, "fleet")
    parser.add_argument("--replicas", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine("sqlalchemy", "psycopg")}
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory), 0) as stack,
    ):
        for name, replicas in (("alone", 1), ("fleet", arguments.replicas)):
            create(stack, name)
            result[name] = asyncio.run(measure(stack, name, replicas, arguments.seconds))
    report(result, arguments.out)


if __name__ == "__main__":
    main()
