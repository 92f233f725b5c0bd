"""Measures the buffer service with 1,000,000 prompts and 10,000,000 groups.

    python -m benchmarks.buffer [--prompts 1000000] [--steps 39000]
                                [--out benchmarks/results/buffer.json]

Fills a database directly (COPY), then calls the real service over HTTP, one call at a time:

- calls every statistics route, with parameters drawn at random for each call;
- builds batches of 256 groups, commits them, and asks for the decisions on their prompts;
- ingests steps (256 groups x 8 responses x 512 tokens), and compares that with a bare S3 PUT of the
  same bytes plus COPY of the same rows.

The same is measured for a run of 2,000 prompts in the same service, which tells the effect of size
from that of the machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from rich.console import Console

from bapo_core.config import RunConfig, config_from
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import SCHEMA
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints, running_stack

BATCH, SIZE, TOKENS = 256, 8, 512
SNAPSHOT_EVERY = 32
SMALL_PROMPTS, SMALL_STEPS = 2_000, 200
CALLS = 60
"""Measured calls of each route; p95 is then the fourth largest."""
BUILDS = 120


# ---- filling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filled:
    """The name and size of a run that is filled into the database."""

    name: str
    prompts: int
    steps: int

    @property
    def config(self) -> RunConfig:
        return config_from(
            {
                "name": self.name,
                "steps": self.steps + 10_000,
                "task": {"options": {"template": "short"}},
                "rollout": {"prompts_per_step": BATCH, "group_size": SIZE},
            }
        )


def fill(url: str, run: Filled, console: Console) -> None:
    """Fills every table as the service would have after `run.steps` commits."""
    rng = np.random.default_rng(run.prompts)
    correct = rng.integers(0, SIZE + 1, (run.steps, BATCH), dtype=np.uint8)
    # Some prompts never succeed, so that the listing of the hardest prompts is not empty.
    position = (np.arange(run.steps)[:, None] * BATCH + np.arange(BATCH)) % run.prompts
    correct[position % 10 == 0] = 0
    with psycopg.connect(url, autocommit=True) as connection:
        # The rows are right by construction, and checking ten million foreign keys takes minutes.
        connection.execute("set session_replication_role = replica")
        run_id, first_prompt = _fill_run(connection, run)
        console.print(f"{run.name}: prompts filled")
        first_group = _fill_groups(connection, run, run_id, first_prompt, position, correct)
        console.print(f"{run.name}: groups filled")
        _fill_derived(connection, run, run_id, first_prompt, position, correct)
        _fill_members(connection, run, run_id, first_group)
        # Autovacuum and the checkpointer would have done this in the hours that such a run takes.
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")


def _copy(
    connection: psycopg.Connection[Any], table: str, columns: str, lines: Iterator[str]
) -> None:
    with connection.cursor().copy(f"copy {table} ({columns}) from stdin") as copy:  # type: ignore[arg-type]
        for line in lines:
            copy.write(line)


def _fill_run(connection: psycopg.Connection[Any], run: Filled) -> tuple[int, int]:
    names = (f"{run.name}-train", f"{run.name}-test")
    first = _next(connection, "prompt")

    def prompts() -> Iterator[str]:
        for dataset, count in zip(names, (run.prompts, 8), strict=True):
            for n in range(count):
                payload = json.dumps({"nums": [n % 97, n % 89, n % 83], "target": n % 101})
                yield f"{dataset}\tcountdown:{n}\t{n}\tcountdown\t{payload}\n"

    _copy(connection, "prompt", "dataset, uid, position, task, payload", prompts())
    for dataset, count in zip(names, (run.prompts, 8), strict=True):
        connection.execute("insert into dataset values (%s, %s)", [dataset, count])
    row = connection.execute(
        "insert into run"
        " (name, config, train_dataset, test_datasets, status, current_step, attempt)"
        " values (%s, %s, %s, jsonb_build_object('test', %s::text), 'running', %s, 1) returning id",
        [run.name, run.config.model_dump_json(), *names, run.steps],
    ).fetchone()
    assert row is not None
    return int(row[0]), first


def _next(connection: psycopg.Connection[Any], table: str) -> int:
    row = connection.execute(f"select coalesce(max(id), 0) + 1 from {table}").fetchone()  # type: ignore[arg-type]
    assert row is not None
    return int(row[0])


def _fill_groups(
    connection: psycopg.Connection[Any],
    run: Filled,
    run_id: int,
    first_prompt: int,
    position: NDArray[Any],
    correct: NDArray[Any],
) -> int:
    first = _next(connection, "rollout_group")
    columns = (
        "run_id, step, kind, prompt_id, position, policy_version, correct, size, accuracy,"
        " mean_reward, reward_parts, outcomes, repeated, object_key, object_digest, row_start,"
        " row_count, token_count"
    )
    digest = "0" * 64

    def lines() -> Iterator[str]:
        for index in range(run.steps):
            step = index + 1
            key = f"runs/{run.name}/trajectories/step={step}/fresh-0.arrow"
            yield "".join(
                f"{run_id}\t{step}\tfresh\t{first_prompt + p}\t{n}\t{max(1, step - step % 5)}\t{c}"
                f"\t{SIZE}\t{c / SIZE}\t{c / SIZE}\t{_parts(c / SIZE)}\t{_OUTCOMES}\t{{}}"
                f"\t{key}\t{digest}\t{n * SIZE}\t{SIZE}\t{SIZE * 100}\n"
                for n, (p, c) in enumerate(
                    zip(position[index].tolist(), correct[index].tolist(), strict=True)
                )
            )

    _copy(connection, "rollout_group", columns, lines())
    return first


def _fill_derived(
    connection: psycopg.Connection[Any],
    run: Filled,
    run_id: int,
    first_prompt: int,
    position: NDArray[Any],
    correct: NDArray[Any],
) -> None:
    """Fills difficulty, snapshots and step records, computed as arrays."""
    n = run.prompts
    attempts = np.zeros(n, np.int64)
    first, last, best = np.zeros(n), np.zeros(n), np.zeros(n)
    solved, seen = np.full(n, -1), np.zeros(n, np.int64)
    bins = np.full(n, 255, np.uint8)
    counts = np.zeros(SIZE + 1, np.int64)
    metrics = json.dumps({f"metric/{k}": 0.123456789 * k for k in range(30)})
    records, snapshots = io.StringIO(), []
    for index in range(run.steps):
        step, prompts, successes = index + 1, position[index], correct[index]
        before = bins[prompts]
        counts -= np.bincount(before[before != 255], minlength=SIZE + 1)
        counts += np.bincount(successes, minlength=SIZE + 1)
        mean = successes / SIZE
        first[prompts] = np.where(attempts[prompts] == 0, mean, first[prompts])
        newly_solved = (solved[prompts] < 0) & (successes > 0)
        solved[prompts] = np.where(newly_solved, step, solved[prompts])
        best[prompts] = np.maximum(best[prompts], mean)
        last[prompts], seen[prompts], bins[prompts] = mean, step, successes
        attempts[prompts] += 1
        composition = json.dumps(
            {
                "rolled_out": BATCH,
                "reevaluated_total": 0,
                "fresh": 128,
                "reevaluated": 0,
                "replayed": 64,
            }
        )
        step_bins = np.bincount(successes, minlength=SIZE + 1).tolist()
        records.write(
            f"{run_id}\t{step}\t0.5\t0.3\t0.45\t{composition}\t{BATCH * SIZE}\t{BATCH * SIZE * 100}"
            f"\t{step_bins}\t{counts.tolist()}\t{metrics}"
            f"\t{statistics.mean(mean)}\t{_parts(statistics.mean(mean))}\t2026-01-01\n"
        )
        if step % SNAPSHOT_EVERY == 0:
            snapshots.append((step, bins.tobytes()))
    for step, snapshot in snapshots:
        connection.execute(
            "insert into difficulty_snapshot values (%s, %s, %s)", [run_id, step, snapshot]
        )
    _copy(
        connection,
        "step_record",
        "run_id, step, r_tot, c2, c3, counts, rollouts, tokens, bins, difficulty_bins, metrics,"
        " mean_reward, reward_parts, committed_at",
        iter([records.getvalue()]),
    )
    _copy(
        connection,
        "prompt_difficulty",
        "run_id, prompt_id, attempts, first_mean, last_mean, best_mean, first_solved_step,"
        " last_step, bin",
        (
            f"{run_id}\t{first_prompt + p}\t{attempts[p]}\t{first[p]}\t{last[p]}\t{best[p]}"
            f"\t{solved[p] if solved[p] >= 0 else chr(92) + 'N'}\t{seen[p]}\t{bins[p]}\n"
            for p in np.flatnonzero(attempts).tolist()
        ),
    )
    _copy(
        connection,
        "evaluation",
        "run_id, version, evaluation_set, mean_accuracy, mean_reward, bins, prompts, tokens",
        (
            f"{run_id}\t{v}\ttest\t0.5\t0.5\t{[1] * 8 + [0]}\t8\t800\n"
            for v in range(20, run.steps, 200)
        ),
    )


def _fill_members(
    connection: psycopg.Connection[Any],
    run: Filled,
    run_id: int,
    first_group: int,
) -> None:
    """Fills batches and buffers.

    Each step has 128 fresh groups in its batch, puts 64 into the high-quality buffer for 3 steps,
    and 16 into the hard buffer for 16 steps.
    """

    def members() -> Iterator[str]:
        for index in range(run.steps):
            start = first_group + index * BATCH
            yield "".join(f"{run_id}\t{index + 1}\t{n}\t{start + n}\tfresh\n" for n in range(128))

    def entries() -> Iterator[str]:
        for index in range(run.steps):
            start, step = first_group + index * BATCH, index + 1
            lines = []
            for buffer, offset, count, stay, reason in (
                ("high_quality", 0, 64, 3, "expired"),
                ("hard", 64, 16, 16, "capacity"),
            ):
                evicted = step + stay
                end = f"{evicted}\t{reason}" if evicted <= run.steps else "\\N\t\\N"
                lines += [
                    f"{run_id}\t{buffer}\t{start + offset + n}\t0.375\t{step}\t{end}\n"
                    for n in range(count)
                ]
            yield "".join(lines)

    _copy(connection, "batch_member", "run_id, step, position, group_id, source", members())
    _copy(
        connection,
        "buffer_entry",
        "run_id, buffer, group_id, accuracy, inserted_step, evicted_step, eviction_reason",
        entries(),
    )


# ---- reading ------------------------------------------------------------------------------------


def route_paths(run: Filled, rng: random.Random) -> dict[str, Callable[[], str]]:
    """Returns for each statistics route a function that draws a path with random parameters."""

    def step() -> int:
        return rng.randint(1, run.steps)

    def uid() -> str:
        return f"countdown:{rng.randrange(min(run.prompts, run.steps * BATCH))}"

    def pair() -> str:
        first, second = sorted((step(), step()))
        return f"before={first}&after={second}"

    return {
        "steps": lambda: f"steps?after={step()}&limit=100",
        "steps sampled": lambda: "steps?points=500",
        "evaluations": lambda: "evaluations",
        "difficulty bins": lambda: f"difficulty/bins?step={step()}",
        "difficulty bins history": lambda: "difficulty/bins/history?points=500",
        "difficulty migration": lambda: f"difficulty/migration?{pair()}",
        "prompts": lambda: "prompts?limit=100",
        "prompts by bin": lambda: f"prompts?bin={rng.randint(0, SIZE)}&limit=100",
        "prompts hardest": lambda: "prompts?order=hardest&limit=100",
        "prompts most improved": lambda: "prompts?order=most_improved&limit=100",
        "prompts forgotten": lambda: "prompts?trend=forgotten&limit=100",
        "prompts unlocked": lambda: f"prompts?unlocked_after={step()}&limit=100",
        "prompts searched": lambda: f"prompts?search={rng.randrange(run.prompts)}&limit=100",
        "prompts searched, common": lambda: "prompts?search=nums&limit=100",
        "prompt history": lambda: f"prompts/history?uid={uid()}",
        # Batches that are filled have no recorded reasons, as those of earlier versions.
        "decision, composed again": lambda: f"steps/{step()}/decision?uid={uid()}",
        "buffer now": lambda: "buffers/high_quality",
        "buffer as of": lambda: f"buffers/hard?step={step()}",
        "buffer events": lambda: f"buffers/high_quality/events?after={step()}",
        "batches": lambda: "batches",
        "batch": lambda: f"batches/{step()}",
        "weights": lambda: "weights",
        "run": lambda: "",
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def decision_paths(run: Filled, rng: random.Random) -> dict[str, Callable[[], str]]:
    """Returns a function that draws a path to a decision of a batch that `build_batches` built."""

    def path() -> str:
        step = run.steps + rng.randint(1, BUILDS)
        return f"steps/{step}/decision?uid=countdown:{rng.randrange(run.prompts)}"

    return {"decision": path}


def measure_routes(
    stack: Endpoints, run: Filled, paths: dict[str, Callable[[], str]]
) -> dict[str, dict[str, float]]:
    """Returns p50 and p95 of each route in ms."""
    latencies = {}
    headers = {"Authorization": f"Bearer {stack.token}"}
    with httpx.Client(base_url=stack.buffer_url, headers=headers, timeout=120) as client:
        for name, path in paths.items():
            times = []
            for call in range(CALLS + 3):
                started = time.perf_counter()
                client.get(f"/v1/runs/{run.name}/{path()}".rstrip("/")).raise_for_status()
                if call >= 3:
                    times.append((time.perf_counter() - started) * 1e3)
            latencies[name] = {"p50_ms": percentile(times, 0.5), "p95_ms": percentile(times, 0.95)}
    return latencies


# ---- writing ------------------------------------------------------------------------------------


def trajectories(uids: list[str], version: int, tokens: int, rng: np.random.Generator) -> bytes:
    """Returns the groups of a step with random tokens and rewards, encoded as Arrow."""
    rows = len(uids) * SIZE
    offsets = np.arange(rows + 1, dtype=np.int32) * tokens

    def lists(values: NDArray[Any]) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    rewards = pa.array(rng.integers(0, 2, rows).astype(np.float32))
    names = pa.array(["answer"] * rows)
    columns = [
        pa.array(np.repeat(np.arange(len(uids), dtype=np.int32), SIZE)),
        pa.array([uid for uid in uids for _ in range(SIZE)]),
        pa.array(np.tile(np.arange(SIZE, dtype=np.int32), len(uids))),
        pa.array([[1, 2, 3]] * rows, pa.list_(pa.int32())),
        lists(rng.integers(0, 150_000, rows * tokens).astype(np.int32)),
        lists(-rng.random(rows * tokens).astype(np.float32)),
        pa.array(np.full(rows, version, dtype=np.int64)),
        rewards,
        pa.array(["stop"] * rows),
        pa.array(["x" * 3 * tokens] * rows),
        pc.equal(rewards, 1),
        pa.MapArray.from_arrays(np.arange(rows + 1, dtype=np.int32), names, rewards),
        pa.array([""] * rows),
        pa.array([[]] * rows, SCHEMA.field("interruptions").type),
        pa.array(["scored"] * rows),
        pa.array([[]] * rows, SCHEMA.field("repeated").type),
        pa.array(["ok"] * rows),
        pa.array(["x"] * rows),
        pa.array([None] * rows, pa.string()),
    ]
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
    return bytes(sink.getvalue().to_pybytes())


def build_batches(stack: Endpoints, run: Filled) -> dict[str, float]:
    """Returns the latencies of building and committing the batches of the next steps, in ms."""
    client = BufferClient(stack.buffer_url, stack.token, run=run.name, attempt=1)
    rng = np.random.default_rng(2)
    built, committed = [], []
    for step in range(run.steps + 1, run.steps + 1 + BUILDS):
        for kind in ("fresh", "reevaluation"):
            if kind == "reevaluation" and not run.config.schedule.reevaluates_at(step):
                continue
            prompts = client.step_prompts(step, kind)
            uids = [prompt.uid for prompt in prompts.prompts]
            client.post_groups(step, kind, trajectories(uids, prompts.policy_version, 4, rng))
        started = time.perf_counter()
        assert client.batch(step).ready
        built.append((time.perf_counter() - started) * 1e3)
        started = time.perf_counter()
        client.commit(step, {"loss": 0.0})
        committed.append((time.perf_counter() - started) * 1e3)
    return {
        "build_p50_ms": percentile(built, 0.5),
        "build_p99_ms": percentile(built, 0.99),
        "commit_p50_ms": percentile(committed, 0.5),
        "commit_p99_ms": percentile(committed, 0.99),
    }


def check_reasons(url: str, run: Filled) -> None:
    """Raises `RuntimeError` unless the batches that were built have recorded reasons."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "select count(decisions) from step_record join run on run.id = run_id"
            " where run.name = %s and step > %s",
            [run.name, run.steps],
        ).fetchone()
    if row != (BUILDS,):
        raise RuntimeError(f"{row} of {BUILDS} batches of {run.name} have recorded reasons")


def ingest(stack: Endpoints, run: Filled, url: str) -> dict[str, float]:
    """Returns the seconds to ingest a step, and to PUT and COPY the same without the service."""
    client = BufferClient(stack.buffer_url, stack.token, run=run.name, attempt=1)
    store = ObjectStore(stack.object_store)
    rng = np.random.default_rng(3)
    through, bare, size = [], [], 0
    first = client.run_state().current_step + 1
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table if not exists bare (like rollout_group including all)")
        for number, step in enumerate(range(first, first + 12)):
            prompts = client.step_prompts(step)
            uids = [prompt.uid for prompt in prompts.prompts]
            body = trajectories(uids, prompts.policy_version, TOKENS, rng)
            size = len(body)
            started = time.perf_counter()
            store.put(f"bare/{run.name}/{step}.arrow", body)
            _copy(
                connection,
                "bare",
                _BARE_COLUMNS,
                _bare_rows(run, number, hashlib.sha256(body).hexdigest()),
            )
            bare.append(time.perf_counter() - started)
            started = time.perf_counter()
            client.post_groups(step, "fresh", body)
            through.append(time.perf_counter() - started)
        connection.execute("drop table bare")
    return {
        "bytes": size,
        "bare_seconds": statistics.median(bare[2:]),
        "service_seconds": statistics.median(through[2:]),
        "rate_of_bare": statistics.median(bare[2:]) / statistics.median(through[2:]),
    }


def _parts(mean: float) -> str:
    return json.dumps({"answer": mean})


_OUTCOMES = json.dumps({"scored": SIZE})
_BARE_COLUMNS = (
    "id, run_id, step, kind, prompt_id, position, policy_version, correct, size, accuracy,"
    " mean_reward, reward_parts, outcomes, repeated, object_key, object_digest, row_start,"
    " row_count, token_count"
)


def _bare_rows(run: Filled, number: int, digest: str) -> Iterator[str]:
    for n in range(BATCH):
        yield (
            f"{number * BATCH + n}\t1\t{number}\tfresh\t{n + 1}\t{n}\t1\t4\t{SIZE}\t0.5\t0.5"
            f"\t{_parts(0.5)}\t{_OUTCOMES}\t{{}}\tbare/{run.name}/{number}.arrow\t{digest}"
            f"\t{n * SIZE}\t{SIZE}\t{SIZE * TOKENS}\n"
        )


def serving(stack: Endpoints, run: Filled) -> dict[str, dict[str, float]]:
    """Returns the rise of the service's peak memory in MiB while it serves a group and a batch."""
    client = BufferClient(stack.buffer_url, stack.token, run=run.name, attempt=1)
    step = client.run_state().current_step + 1
    if run.config.schedule.reevaluates_at(step):
        prompts = client.step_prompts(step, "reevaluation")
        uids = [prompt.uid for prompt in prompts.prompts]
        body = trajectories(uids, prompts.policy_version, 4, np.random.default_rng(4))
        client.post_groups(step, "reevaluation", body)
    members = client.batch(step).members
    large = [member for member in members if member.step == step]
    memory = {}
    for name, path, groups in (
        ("one group", f"groups/{large[0].group_id}/arrow", 1),
        ("batch", f"batches/{step}/arrow", len(members)),
    ):
        url = f"{stack.buffer_url}/v1/runs/{run.name}/{path}"
        process = service_process(stack)
        rises = []
        for _ in range(5):
            before = process.memory_info().rss
            # Resets the kernel's high-water mark (VmHWM).
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            size = 0
            headers = {"Authorization": f"Bearer {stack.token}"}
            with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
                answer.raise_for_status()
                for chunk in answer.iter_bytes():
                    size += len(chunk)
            rises.append((_peak(process.pid) - before) / 2**20)
        memory[name] = {
            "groups": groups,
            "mib_served": size / 2**20,
            "peak_rise_mib": statistics.median(rises),
        }
    return memory


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


# ---- everything ---------------------------------------------------------------------------------


def service_memory(stack: Endpoints) -> float:
    """Returns the resident memory of the buffer service's process in MiB."""
    return float(service_process(stack).memory_info().rss / 2**20)


def service_process(stack: Endpoints) -> psutil.Process:
    port = int(stack.buffer_url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            return psutil.Process(connection.pid)
    raise RuntimeError(f"no process listens on port {port}")


def measure(prompts: int, steps: int, console: Console) -> dict[str, Any]:
    runs = [Filled("small", SMALL_PROMPTS, SMALL_STEPS), Filled("large", prompts, steps)]
    result: dict[str, Any] = {
        "prompts": prompts,
        "groups": steps * BATCH,
        "machine": machine("sqlalchemy", "psycopg"),
    }
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory), 0) as stack,
    ):
        url = stack.database_url.replace("postgresql+psycopg", "postgresql")
        for run in runs:
            started = time.perf_counter()
            fill(url, run, console)
            console.print(f"{run.name}: filled in {time.perf_counter() - started:.0f} s")
        result["memory_before_mib"] = service_memory(stack)
        for run in runs:
            paths = route_paths(run, random.Random(1))
            result[run.name] = {"routes": measure_routes(stack, run, paths)}
            console.print(f"{run.name}: routes measured")
        result["memory_after_routes_mib"] = service_memory(stack)
        for run in runs:
            result[run.name] |= build_batches(stack, run)
            check_reasons(url, run)
            decisions = measure_routes(stack, run, decision_paths(run, random.Random(1)))
            result[run.name]["routes"] |= decisions
            result[run.name]["ingest"] = ingest(stack, run, url)
            result[run.name]["serving"] = serving(stack, run)
        result["memory_after_ingest_mib"] = service_memory(stack)
    slowest = max(result["large"]["routes"].items(), key=lambda item: item[1]["p95_ms"])
    result["slowest_route"] = {"name": slowest[0], **slowest[1]}
    return result


def main() -> None:
    parser = make_parser(__doc__, "buffer")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=39_063, help="steps of 256 groups each")
    arguments = parser.parse_args()
    result = measure(arguments.prompts, arguments.steps, Console())
    report(result, arguments.out)


if __name__ == "__main__":
    main()
