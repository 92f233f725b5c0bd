"""The leader's side of vLLM over several nodes: what the worker nodes have on disk, and run.

The leader tells the worker nodes what to do, and they never ask it. So a worker node needs to know
neither the run nor the weights, and one that is replaced is brought up by the next start of vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from services.buffer.api.wire import StoredVersion
from services.common.errors import ServiceCallError
from services.common.http import HttpClient
from services.common.listener import bind_address
from services.common.objectstore import ObjectStore
from services.rollout.api.nodes import EngineState, FetchProgress, KeptVersions, StartEngine
from services.rollout.errors import EngineLost
from services.rollout.vllm.server import NodePlace, VllmOptions
from services.rollout.weights import WeightCache

log = logging.getLogger(__name__)

GIVE_UP_S = 15.0
"""Seconds for which a call is repeated while a worker node does not answer. A new pod's name may
take that long to be known to the cluster's DNS."""
WATCH_INTERVAL_S = 2.0
STOP_TIMEOUT_S = 30.0
"""Seconds that a worker node may take to answer; it may be stopping vLLM."""

Result = TypeVar("Result")


class WorkerNode:
    """A client of one worker node. Every call may raise `EngineLost`."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._http = HttpClient(
            "worker node", url, token, timeout_s=STOP_TIMEOUT_S, give_up_s=GIVE_UP_S
        )

    def fetch(self, stored: StoredVersion) -> None:
        """Returns when the node has the version on its disk, with the digests of its manifest."""
        complete = False
        while not complete:
            content = self._send("PUT", "/v1/weights", json=stored.model_dump())
            complete = FetchProgress.model_validate_json(content).complete

    def keep(self, versions: Collection[StoredVersion]) -> None:
        """Deletes every version but these."""
        kept = KeptVersions(versions=list(versions))
        self._send("PUT", "/v1/weights/kept", json=kept.model_dump())

    def start(self, engine: StartEngine) -> None:
        """Starts vLLM, after stopping the one that runs."""
        self._send("PUT", "/v1/engine", json=engine.model_dump())

    def stop(self) -> None:
        """Stops vLLM if it runs."""
        self._send("DELETE", "/v1/engine")

    def check(self) -> None:
        """Raises `EngineLost` unless vLLM runs."""
        state = EngineState.model_validate_json(self._send("GET", "/v1/engine"))
        if not state.running:
            raise EngineLost(f"vLLM on the worker node {self.url} has exited: {state.detail}")

    def _send(self, method: str, path: str, **arguments: Any) -> bytes:
        try:
            return self._http.call(method, path, **arguments).content
        except ServiceCallError as error:
            raise EngineLost(f"worker node {self.url}: {error}") from error


class WorkerNodes:
    """The nodes over which vLLM shards a model, except for this one, the leader."""

    def __init__(self, urls: Sequence[str], token: str, *, leader_host: str) -> None:
        """Makes clients; nothing is sent yet.

        urls: the node of rank 1 comes first. leader_host: host at which they reach this node.
        """
        self._nodes = [WorkerNode(url, token) for url in urls]
        self._leader_host = leader_host

    def fetch(self, stored: StoredVersion) -> None:
        """Returns when every node has a version on its disk. Blocks. Raises `EngineLost`."""
        with ThreadPoolExecutor(len(self._nodes)) as pool:
            for _ in pool.map(lambda node: node.fetch(stored), self._nodes):
                pass

    def keep(self, versions: Collection[StoredVersion]) -> None:
        """Deletes every version but these from the nodes' disks. Blocks. Raises `EngineLost`."""
        for node in self._nodes:
            node.keep(versions)

    async def start(self, options: VllmOptions, weights: str) -> NodePlace:
        """Starts vLLM on every node and returns the place of the leader, which must start too.

        weights: name of the version's directory.
        """
        leader = NodePlace(0, 1 + len(self._nodes), self._leader_host, _free_port())
        engines = [
            StartEngine(
                weights=weights,
                longest_sequence=options.longest_sequence,
                dtype=options.dtype,
                arguments=list(options.arguments),
                rank=rank,
                nodes=leader.nodes,
                leader_host=leader.leader_host,
                leader_port=leader.leader_port,
            )
            for rank, _ in enumerate(self._nodes, 1)
        ]
        starts = map(asyncio.to_thread, (node.start for node in self._nodes), engines)
        await asyncio.gather(*starts)
        return leader

    async def check(self) -> None:
        """Raises `EngineLost` unless vLLM runs on every node."""
        await asyncio.gather(*(asyncio.to_thread(node.check) for node in self._nodes))

    async def stop(self) -> None:
        """Stops vLLM on every node that answers. Others are gone, or about to be replaced."""
        stopping = (asyncio.to_thread(node.stop) for node in self._nodes)
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if isinstance(error, EngineLost):
                log.warning("vLLM may not have been stopped: %s", error)
            elif isinstance(error, BaseException):
                raise error

    async def run_while_all_run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits `work`, which waits for the nodes' vLLM.

        Raises `EngineLost` as soon as a node's vLLM has ended: the ranks would wait for it for
        half an hour.
        """
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else watching.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _watch(self) -> NoReturn:
        """Raises `EngineLost` when a node's vLLM has ended."""
        while True:
            await self.check()
            await asyncio.sleep(WATCH_INTERVAL_S)


class SharedWeightCache(WeightCache):
    """The caches of all nodes of a replica: a version that is fetched is on every node's disk."""

    def __init__(self, store: ObjectStore, directory: Path, nodes: WorkerNodes) -> None:
        super().__init__(store, directory)
        self._nodes = nodes

    def fetch(self, stored: StoredVersion) -> Path:
        """Returns the version's directory on this node, which has the same name on all nodes.

        Each node fetches the files and verifies their digests by itself. A node that was replaced
        does so when it is asked again. Raises `ObjectStoreError` and `EngineLost`.
        """
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(self._nodes.fetch, stored)
            directory = super().fetch(stored)
            others.result()
        return directory

    def prune(self, keep: Collection[StoredVersion]) -> None:
        super().prune(keep)
        self._nodes.keep(keep)


def _free_port() -> int:
    """Returns a port of this machine, on all interfaces, that nothing listens on at present.

    vLLM takes the port of the rendezvous as a number, so another process may bind it first; the
    ranks then do not meet, and vLLM does not start.
    """
    with bind_address("::", 0) as probe:
        return int(probe.getsockname()[1])
