"""A replica of several nodes: its own code in this process, worker nodes as processes of their own.

The object store is a real one. Only vLLM is a fake (`fake_vllm`); test_vllm_nodes.py has the real
one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import SecretStr

from bapo_core.errors import BapoError
from services.buffer.api.wire import StoredVersion
from services.common.objectstore import ObjectStore, files_of
from services.common.process import ChildProcess, python_command
from services.rollout.errors import EngineLost, ModelLoadError
from services.rollout.server import make_driver, weight_cache, worker_nodes
from services.rollout.settings import ReplicaSettings, VllmSettings
from services.rollout.vllm import nodes as nodes_module
from services.rollout.vllm.driver import VllmDriver
from services.rollout.vllm.nodes import SharedWeightCache, WorkerNodes
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports
from tests.integration.rollout.test_vllm import save_model
from tests.integration.support import fake_vllm
from tests.integration.support.driver import small_config

START_S = 60.0


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens intervals and time-outs."""
    monkeypatch.setattr(nodes_module, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(nodes_module, "GIVE_UP_S", 0.5)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an "interpreter" that is the fake vLLM."""
    program = tmp_path_factory.mktemp("bin") / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake_vllm.__file__}" "$@"\n')
    program.chmod(0o755)
    return program


@dataclass
class Nodes:
    """A leader, which is this process, and two worker nodes, each with a directory of its own."""

    stack: Endpoints
    home: Path
    python: Path
    ports: Mapping[int, int]
    processes: dict[int, ChildProcess] = field(default_factory=dict)
    published: int = 0

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.stack.object_store)

    def start(self, rank: int) -> None:
        """Starts a worker node."""
        process = ChildProcess(
            python_command("services.rollout.worker_node"),
            environment={
                **os.environ,
                **self.stack.environment(),
                "BAPO_PORT": str(self.ports[rank]),
                "BAPO_SCRATCH": str(self.scratch(rank)),
                "BAPO_VLLM_PYTHON": str(self.python),
            },
            log=self.home / f"node-{rank}.log",
        )
        self.processes[rank] = process

    def wait(self) -> None:
        """Waits until all worker nodes answer."""

        async def wait_for(rank: int) -> None:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
                while True:
                    process = self.processes[rank]
                    assert process.exit_code is None, process.last_error()
                    with suppress(httpx.TransportError):
                        if (await client.get(f"{self.url(rank)}/health")).is_success:
                            return
                    await asyncio.sleep(0.05)

        for rank in self.processes:
            asyncio.run(wait_for(rank))

    def url(self, rank: int) -> str:
        return f"http://127.0.0.1:{self.ports[rank]}"

    def scratch(self, rank: int) -> Path:
        return self.home / f"scratch-{rank}"

    def settings(
        self, *, args: str = "", advertise: str | None = "http://localhost:1"
    ) -> ReplicaSettings:
        """Returns the settings of the leader."""
        urls = ",".join(self.url(rank) for rank in sorted(self.ports))
        return ReplicaSettings(
            port=1,
            run="nodes",
            scratch=self.scratch(0),
            buffer_url=self.stack.buffer_url,
            token=SecretStr(self.stack.token),
            s3=self.stack.object_store,
            advertise=advertise,
            vllm=VllmSettings(
                python=str(self.python), nodes=urls, args=args, start_within_s=START_S
            ),
        )

    def leader(self, args: str = "") -> tuple[VllmDriver, SharedWeightCache]:
        """Returns a driver and a cache as of a new leader, whose disk is empty."""
        shutil.rmtree(self.scratch(0), ignore_errors=True)
        settings = self.settings(args=args)
        settings.scratch.mkdir()
        nodes = worker_nodes(settings)
        config = small_config(
            "nodes", rollout={"engine": "vllm", "prompts_per_step": 8, "group_size": 4}
        )
        driver = make_driver(config, settings.scratch, settings.vllm, nodes=nodes)
        cache = weight_cache(self.store, settings.scratch, nodes)
        assert isinstance(driver, VllmDriver)
        assert isinstance(cache, SharedWeightCache)
        return driver, cache

    def publish(self, marker: str) -> StoredVersion:
        self.published += 1
        directory = save_model(self.home / f"published-{self.published}", seed=self.published)
        (directory / "marker").write_text(marker)
        prefix = f"runs/nodes/weights/v{self.published}"
        digest = self.store.put_files(prefix, files_of(directory))
        return StoredVersion(number=self.published, uri=prefix, manifest_digest=digest)

    def engines(self, rank: int) -> list[psutil.Process]:
        """Returns the fake vLLMs that a worker node runs."""
        return psutil.Process(self.processes[rank].pid).children()

    def on_disk(self, rank: int) -> set[str]:
        return {path.name.split("-")[0] for path in self.scratch(rank).glob("v[0-9]*-*")}

    def directory(self, rank: int, stored: StoredVersion) -> Path:
        (directory,) = self.scratch(rank).glob(f"v{stored.number}-*")
        return directory

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()


@pytest.fixture(scope="module")
def running(
    stack: Endpoints, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    with reserve_ports(2) as ports:
        nodes = Nodes(stack, tmp_path_factory.mktemp("nodes"), python, dict(enumerate(ports, 1)))
        for rank in nodes.ports:
            nodes.start(rank)
        yield nodes
        nodes.stop()


@pytest.fixture
def nodes(running: Nodes) -> Iterator[Nodes]:
    """Yields nodes with empty disks that run nothing."""
    for rank, process in running.processes.items():
        if process.exit_code is not None:
            running.start(rank)
    running.wait()
    others = worker_nodes(running.settings())
    assert others is not None
    asyncio.run(others.stop())
    others.keep([])
    yield running
    # A leader that a failed test left would be a process of the stack to the tests after it.
    for process in psutil.Process().children():
        # psutil raises NoSuchProcess for a process that has ended, and for a zombie.
        with suppress(psutil.NoSuchProcess):
            if "--uds" in process.cmdline():
                process.kill()


def loaded(driver: VllmDriver) -> dict[str, str]:
    """Returns the marker of the weights of each rank."""
    assert driver._server is not None
    words = psutil.Process(driver._server.pid).cmdline()
    transport = httpx.HTTPTransport(uds=words[words.index("--uds") + 1])
    with httpx.Client(transport=transport, base_url="http://vllm") as client:
        return dict(json.loads(client.get("/loaded").content))


async def load(driver: VllmDriver, cache: SharedWeightCache, stored: StoredVersion) -> None:
    directory = await asyncio.to_thread(cache.fetch, stored)
    await driver.load(directory, stored.number)


def last_arguments(log: Path) -> str:
    """Returns the arguments that the last fake vLLM of a node was started with.

    They need not be the last line: a server also reports clients that do not wait for an answer.
    """
    return [line for line in log.read_text().splitlines() if line.startswith("arguments: ")][-1]


async def check_until_lost(driver: VllmDriver) -> None:
    while True:
        await driver.check()


def test_a_version_is_on_every_node_before_it_is_loaded_there(nodes: Nodes) -> None:
    first, second = nodes.publish("one"), nodes.publish("two")
    driver, cache = nodes.leader()

    async def work() -> None:
        await load(driver, cache, first)
        assert loaded(driver) == {"0": "one", "1": "one", "2": "one"}
        assert driver._server is not None
        pid = driver._server.pid
        workers = [nodes.engines(rank)[0].pid for rank in (1, 2)]
        await load(driver, cache, second)
        assert loaded(driver) == {"0": "two", "1": "two", "2": "two"}
        assert driver._server.pid == pid, "weights are replaced in place"
        assert [nodes.engines(rank)[0].pid for rank in (1, 2)] == workers
        await driver.check()
        names = [f"v{stored.number}" for stored in (first, second)]
        assert [nodes.on_disk(rank) for rank in (0, 1, 2)] == [set(names)] * 3
        await asyncio.to_thread(cache.prune, [second])
        assert [nodes.on_disk(rank) for rank in (0, 1, 2)] == [{names[1]}] * 3
        assert (nodes.scratch(1) / "vllm-modules").is_dir(), "it is no version"
        await driver.close()
        assert [nodes.engines(rank) for rank in (1, 2)] == [[], []]

    asyncio.run(work())


def test_all_nodes_run_the_same_model_with_the_same_arguments(nodes: Nodes) -> None:
    stored = nodes.publish("one")
    driver, cache = nodes.leader(args="--pipeline-parallel-size 3")

    async def work() -> None:
        await load(driver, cache, stored)
        arguments = {last_arguments(nodes.scratch(rank) / "vllm.log") for rank in (0, 1, 2)}
        assert len(arguments) == 1
        assert "'--pipeline-parallel-size', '3'" in arguments.pop()
        await driver.close()

    asyncio.run(work())


def test_a_node_whose_file_is_damaged_fetches_it_again(nodes: Nodes) -> None:
    """Its next process verifies every digest before vLLM reads a file."""
    stored = nodes.publish("one")
    _, cache = nodes.leader()
    cache.fetch(stored)
    nodes.processes[2].stop()
    directory = nodes.directory(2, stored)
    (directory / "marker").write_text("other")
    nodes.start(2)
    nodes.wait()
    cache.fetch(stored)
    assert (directory / "marker").read_text() == "one"


def test_files_that_cannot_be_fetched_are_an_error_that_names_the_node(nodes: Nodes) -> None:
    stored = nodes.publish("one")
    _, cache = nodes.leader()
    missing = stored.model_copy(update={"uri": "runs/nowhere", "manifest_digest": "0" * 64})
    with pytest.raises(BapoError):
        cache.fetch(missing)
    only_there = nodes.leader()[1]
    only_there._verified.add(only_there._place(missing))  # this node has it
    with pytest.raises(EngineLost, match=f"worker node {nodes.url(1)}|worker node {nodes.url(2)}"):
        only_there.fetch(missing)


def test_a_lost_vllm_on_a_worker_node_is_noticed_and_all_are_restarted(nodes: Nodes) -> None:
    stored = nodes.publish("one")
    driver, cache = nodes.leader()

    async def work() -> None:
        await load(driver, cache, stored)
        (victim,) = nodes.engines(2)
        (other,) = nodes.engines(1)
        os.kill(victim.pid, signal.SIGKILL)
        async with asyncio.timeout(START_S):
            with pytest.raises(EngineLost, match=f"worker node {nodes.url(2)} has exited"):
                await check_until_lost(driver)
        # The replica then loads the version again.
        await driver.close()
        await load(driver, cache, stored)
        assert loaded(driver) == {"0": "one", "1": "one", "2": "one"}
        assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        await driver.close()

    asyncio.run(work())


def test_a_replaced_worker_node_gets_the_weights_again(nodes: Nodes) -> None:
    """A new pod has an empty disk and runs nothing; it joins when the leader starts vLLM next."""
    stored = nodes.publish("one")
    driver, cache = nodes.leader()

    async def work() -> None:
        await load(driver, cache, stored)

    asyncio.run(work())
    nodes.processes[1].send_signal(signal.SIGKILL)
    nodes.processes[1].wait()
    with pytest.raises(EngineLost, match="has not served the call"):
        asyncio.run(driver.check())
    shutil.rmtree(nodes.scratch(1))
    nodes.start(1)
    nodes.wait()

    async def again() -> None:
        with pytest.raises(EngineLost, match="it was not started since this node was"):
            await driver.check()
        await driver.close()
        await load(driver, cache, stored)
        assert loaded(driver) == {"0": "one", "1": "one", "2": "one"}
        await driver.close()

    asyncio.run(again())


def test_a_vllm_that_does_not_start_on_a_worker_node_ends_the_wait_of_the_others(
    nodes: Nodes,
) -> None:
    """The leader would wait for the missing rank until its time-out."""
    stored = nodes.publish("one")
    driver, cache = nodes.leader()

    async def work() -> None:
        directory = await asyncio.to_thread(cache.fetch, stored)
        (nodes.directory(2, stored) / "marker").write_text("crash")
        with pytest.raises(EngineLost, match="RuntimeError: bad weights"):
            await driver.load(directory, stored.number)
        assert [nodes.engines(rank) for rank in (1, 2)] == [[], []], "nothing is left"
        assert driver._server is None

    asyncio.run(work())


def test_arguments_that_vllm_does_not_know_are_reported_from_its_log(nodes: Nodes) -> None:
    stored = nodes.publish("one")
    driver, cache = nodes.leader(args="--unknown")

    async def work() -> None:
        with pytest.raises((EngineLost, ModelLoadError), match="unrecognized arguments: --unknown"):
            await load(driver, cache, stored)
        await driver.close()

    asyncio.run(work())


def test_a_worker_node_obeys_only_the_token_and_only_for_weights_that_it_has(nodes: Nodes) -> None:
    engine = {
        "weights": "v1-00",
        "longest_sequence": 8,
        "dtype": "float32",
        "arguments": [],
        "rank": 1,
        "nodes": 2,
        "leader_host": "localhost",
        "leader_port": 1,
    }
    with httpx.Client(base_url=nodes.url(1)) as client:
        for method, path in (
            ("PUT", "/v1/engine"),
            ("GET", "/v1/engine"),
            ("DELETE", "/v1/engine"),
            ("PUT", "/v1/weights"),
            ("PUT", "/v1/weights/kept"),
        ):
            assert client.request(method, path, json=engine).status_code == 401
        client.headers["Authorization"] = f"Bearer {nodes.stack.token}"
        refused = client.put("/v1/engine", json=engine)
        assert refused.status_code == 409
        assert "v1-00 is not on this node's disk; have it fetched first" in refused.text
        outside = client.put("/v1/engine", json={**engine, "weights": "../published-1"})
        assert outside.status_code == 422
        assert client.get("/v1/engine").json()["running"] is False
        assert client.get("/metrics").is_success


def test_a_worker_node_takes_its_vllm_with_it(nodes: Nodes) -> None:
    stored = nodes.publish("one")
    driver, cache = nodes.leader()

    async def work() -> None:
        await load(driver, cache, stored)
        (engine,) = nodes.engines(1)
        await asyncio.to_thread(nodes.processes[1].stop)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        await driver.close()

    asyncio.run(work())


def test_several_nodes_need_vllm_and_an_address(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(BapoError, match="BAPO_ADVERTISE must be the address at which the worker"):
        worker_nodes(nodes.settings(advertise=None))
    some = WorkerNodes(["http://a"], "", leader_host="b")
    with pytest.raises(BapoError, match="which runs on one node, but this replica has several"):
        make_driver(small_config("one"), tmp_path, VllmSettings(), nodes=some)
