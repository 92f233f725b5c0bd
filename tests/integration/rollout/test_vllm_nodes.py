"""The real vLLM over two nodes, both of which are this machine. Run `make install-vllm` first.

The leader is this process, and the worker node a process of its own with a directory of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.buffer.api.wire import StoredVersion
from services.common.objectstore import files_of
from services.rollout.errors import EngineLost
from services.rollout.server import CPU_ARGUMENTS
from services.rollout.vllm.driver import VllmDriver
from services.rollout.vllm.nodes import SharedWeightCache, WorkerNodes
from services.rollout.vllm.server import VllmOptions, find_python
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports
from tests.integration.rollout.test_vllm import (
    LONGEST,
    check_logprobs,
    generate,
    request,
    save_model,
)
from tests.integration.rollout.test_worker_nodes import Nodes, check_until_lost

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SHARDED = {
    # With --enforce-eager, vLLM 0.32 leaves out the warm-up on CPUs, without which the later stages
    # of a pipeline fail at the first request ("intermediate_tensors is not None").
    "pipeline": [
        *("--pipeline-parallel-size", "2"),
        *("--compilation-config", '{"mode": 2, "backend": "eager"}'),
    ],
    "tensor": ["--tensor-parallel-size", "2", "--enforce-eager"],
}
"""Arguments of vLLM for each way in which two ranks can share a model."""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def nodes(stack: Endpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    python = Path(find_python(os.environ.get("BAPO_VLLM_PYTHON")))
    with pytest.MonkeyPatch.context() as patch, reserve_ports(1) as (port,):
        # The nodes share this machine's cores, so that none may bind its threads to them.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        nodes = Nodes(stack, tmp_path_factory.mktemp("nodes"), python, {1: port})
        nodes.start(1)
        nodes.wait()
        yield nodes
        nodes.stop()


@pytest.fixture(scope="module", params=SHARDED)
def leader(
    nodes: Nodes, runner: asyncio.Runner, request: pytest.FixtureRequest
) -> Iterator[tuple[VllmDriver, SharedWeightCache]]:
    scratch = nodes.home / f"leader-{request.param}"
    scratch.mkdir()
    others = WorkerNodes([nodes.url(1)], nodes.stack.token, leader_host="localhost")
    options = VllmOptions(
        str(nodes.python),
        LONGEST,
        "float32",
        scratch / "vllm.log",
        [*CPU_ARGUMENTS, "--max-num-seqs", "64", *SHARDED[request.param]],
    )
    driver = VllmDriver(options, others)
    yield driver, SharedWeightCache(nodes.store, scratch, others)
    runner.run(driver.close())


def publish(nodes: Nodes, seed: int, *, tied: bool = False) -> tuple[StoredVersion, Path]:
    nodes.published += 1
    directory = save_model(nodes.home / f"published-{nodes.published}", seed=seed, tied=tied)
    prefix = f"runs/vllm-nodes/weights/v{nodes.published}"
    digest = nodes.store.put_files(prefix, files_of(directory))
    stored = StoredVersion(number=nodes.published, uri=prefix, manifest_digest=digest)
    return stored, directory


async def load(leader: tuple[VllmDriver, SharedWeightCache], stored: StoredVersion) -> None:
    driver, cache = leader
    await driver.load(await asyncio.to_thread(cache.fetch, stored), stored.number)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_nodes_generate_with_the_weights_that_were_loaded_last(
    leader: tuple[VllmDriver, SharedWeightCache], nodes: Nodes, runner: asyncio.Runner, tied: bool
) -> None:
    driver, _ = leader
    pid = None
    for seed in (1, 2):
        stored, directory = publish(nodes, seed, tied=tied)
        runner.run(load(leader, stored))
        asked = request(stored.number)
        check_logprobs(directory, asked, runner.run(generate(driver, asked)))
        runner.run(driver.check())
        assert driver._server is not None
        assert pid in (None, driver._server.pid), "weights are replaced in place"
        pid = driver._server.pid


@pytest.mark.slow
def test_a_killed_vllm_of_the_worker_node_is_noticed_and_both_are_restarted(
    leader: tuple[VllmDriver, SharedWeightCache], nodes: Nodes, runner: asyncio.Runner
) -> None:
    driver, _ = leader
    stored, directory = publish(nodes, 3)
    runner.run(load(leader, stored))
    (engine,) = nodes.engines(1)
    family = [engine, *engine.children(recursive=True)]
    os.kill(engine.pid, signal.SIGKILL)

    async def lost() -> None:
        async with asyncio.timeout(60):
            await check_until_lost(driver)

    with pytest.raises(EngineLost, match="has exited"):
        runner.run(lost())
    runner.run(driver.close())
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    runner.run(load(leader, stored))
    asked = request(stored.number)
    check_logprobs(directory, asked, runner.run(generate(driver, asked)))
