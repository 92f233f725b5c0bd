"""Measures the cost of isolation: verdicts per second over HTTP and of the bare function.

    python -m benchmarks.verifier [--out benchmarks/results/verifier.json]

The bare rate is that of `Task.verify` on one core, in a process of its own, times the number of
cores. The other is that of the service with one worker per core. `--clients` threads, and then one
alone, send it batches of 2,048; with several, one batch is read while another is scored, as when
runs share a verifier. Client, server and workers share the cores. The rates are measured in turn,
several times; the ratio is that of the medians.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from bapo_core.tasks import Payload, get_task
from bapo_core.tasks.countdown import random_expression
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.stack.supervisor import reserve_ports

GROUP_SIZE = 8
CORES = os.cpu_count() or 1
_THOUGHT = "Let me try another way: 12 + 30 is 42, so I am one step away. "


def countdown_items(count: int) -> list[dict[str, Any]]:
    """Returns `count` responses of about 300 characters: some text, then a random expression."""
    task = get_task("countdown")
    rng = random.Random(0)

    def response(payload: Payload) -> str:
        text, _ = random_expression(payload["nums"], rng)
        return f"<think>{_THOUGHT * 4}</think>\n<answer>{text}</answer>"

    return _grouped(task.generate(0, count // GROUP_SIZE), response)  # type: ignore[attr-defined]


def math_items(count: int) -> list[dict[str, Any]]:
    """Returns `count` responses with fractions, of which half are right."""
    rng = random.Random(0)
    payloads = [
        {"problem": f"What is ${n}/7$?", "answer": rf"\frac{{{n}}}{{7}}"}
        for n in range(1, count // GROUP_SIZE + 1)
    ]

    def response(payload: Payload) -> str:
        n = int(payload["problem"].split("$")[1].split("/")[0])
        k = rng.randint(2, 50)
        top = k * n + rng.randint(0, 1)
        return rf"{_THOUGHT * 4} Therefore \boxed{{\frac{{{top}}}{{{7 * k}}}}}."

    return _grouped(payloads, response)


def _grouped(payloads: list[Payload], response: Any) -> list[dict[str, Any]]:
    return [
        {"payload": payload, "responses": [response(payload) for _ in range(GROUP_SIZE)]}
        for payload in payloads
    ]


ITEMS = {"countdown": countdown_items, "math": math_items}


def bare_rate(task: str, batch: int, batches: int) -> float:
    """Returns the verdicts per second of the function alone, in a process of its own."""
    code = (
        "import sys; from benchmarks.verifier import measure_bare\n"
        "print(measure_bare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, task, str(batch), str(batches)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(process.stdout)


def measure_bare(task: str, batch: int, batches: int) -> float:
    work = [(i["payload"], response) for i in ITEMS[task](batch) for response in i["responses"]]
    verify = get_task(task).verify
    for payload, response in work:  # warm-up, as the service's workers have had
        verify(payload, response)
    started = time.perf_counter()
    for _ in range(batches):
        for payload, response in work:
            verify(payload, response)
    return batches * len(work) / (time.perf_counter() - started)


@contextmanager
def verifier() -> Iterator[httpx.Client]:
    """Runs the service in a process of its own, with one worker per core; yields a client."""
    with reserve_ports(1) as (port,), _serving(port) as client:
        yield client


@contextmanager
def _serving(port: int) -> Iterator[httpx.Client]:
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.verifier.app"],
        env={
            **os.environ,
            "BAPO_TOKEN": token,
            "BAPO_PORT": str(port),
            "BAPO_VERIFIER_WORKERS": str(CORES),
        },
    )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=600
        ) as client:
            while not _ready(client):
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def http_rate(client: httpx.Client, body: bytes, batch: int, batches: int, clients: int) -> float:
    """Returns the verdicts per second of the service."""

    def post(_: int) -> None:
        client.post("/v1/verify", content=body).raise_for_status()

    with ThreadPoolExecutor(clients) as threads:
        started = time.perf_counter()
        list(threads.map(post, range(batches)))
        return batches * batch / (time.perf_counter() - started)


def measure(
    task: str, client: httpx.Client, *, batch: int, batches: int, clients: int, repeats: int
) -> dict[str, Any]:
    body = json.dumps({"task": task, "items": ITEMS[task](batch)}).encode()
    http_rate(client, body, batch, 2 * clients, clients)  # warm-up: every worker prepares the task
    bare: list[float] = []
    alone: list[float] = []
    together: list[float] = []
    for _ in range(repeats):
        bare.append(CORES * bare_rate(task, batch, batches))
        alone.append(http_rate(client, body, batch, batches, 1))
        together.append(http_rate(client, body, batch, batches, clients))
    ceiling = statistics.median(bare)
    return {
        "body_bytes": len(body),
        "bare_rate_times_cores": bare,
        "http_rate_one_client": alone,
        f"http_rate_{clients}_clients": together,
        "ratio_one_client": statistics.median(alone) / ceiling,
        "ratio": statistics.median(together) / ceiling,
    }


def main() -> None:
    parser = make_parser(__doc__, "verifier")
    parser.add_argument("--batch", type=int, default=2_048)
    parser.add_argument("--batches", type=int, default=100, help="for math a tenth as many")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"batch": arguments.batch, "workers": CORES}
    with verifier() as client:
        for task, batches in (
            ("countdown", arguments.batches),
            ("math", max(1, arguments.batches // 10)),
        ):
            result[task] = measure(
                task,
                client,
                batch=arguments.batch,
                batches=batches,
                clients=arguments.clients,
                repeats=arguments.repeats,
            )
    result["machine"] = machine("math-verify")
    report(result, arguments.out)


if __name__ == "__main__":
    main()
