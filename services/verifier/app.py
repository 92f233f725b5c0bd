"""`python -m services.verifier.app`: the verifier's HTTP server, which keeps no state.

`VerifierServerSettings` lists its environment variables.

SIGTERM drains it: new requests and `/readyz` get 503, requests in progress are finished (within
`DRAIN_TIMEOUT_S`), then the workers are killed and the process exits. A second SIGTERM stops it at
once.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from starlette.concurrency import run_in_threadpool

from bapo_core.errors import PayloadError
from bapo_core.tasks import task_names
from services.common.auth import SharedToken
from services.common.guard import GuardedRoute
from services.common.logs import configure_logs
from services.common.problems import install_problem_handlers, problem_response
from services.common.process import hide_memory, run_until_error
from services.common.serve import Server, serve
from services.verifier.api.wire import LARGEST_BODY, VerifyAnswer, VerifyItem, VerifyRequest
from services.verifier.pool import Batch, Busy, Draining, TaskRefused, VerifierPool
from services.verifier.requests import (
    answer_body,
    count_statuses,
    read_request,
    too_large,
    work_of,
)
from services.verifier.settings import VerifierServerSettings, VerifierSettings

DRAIN_TIMEOUT_S = 30.0
"""Seconds for requests in progress after SIGTERM. Kubernetes grants as many by default."""
RETRY_AFTER_S = 1
GC_THRESHOLD = 100_000
"""New objects between two runs of the garbage collector: a request of 8,192 responses makes about
as many at once."""


class _ClientDisconnected(Exception):
    """The client closed the connection before its request was answered."""


class _Metrics:
    """The metrics of one app, in a registry of their own: a process may have several apps."""

    def __init__(self, pool: Callable[[], VerifierPool]) -> None:
        self.registry = CollectorRegistry()
        self.verdicts = Counter(
            "bapo_verdicts", "Responses scored", ["task", "status"], registry=self.registry
        )
        self.refused = Counter(
            "bapo_verifier_refused", "Requests refused, by reason", ["why"], registry=self.registry
        )
        waiting = Gauge(
            "bapo_verifier_waiting", "Responses in progress or waiting", registry=self.registry
        )
        waiting.set_function(lambda: pool().waiting())
        restarts = Gauge(
            "bapo_verifier_restarts",
            "Worker processes replaced since the start, by reason",
            ["why"],
            registry=self.registry,
        )
        for why in ("timeout", "crashed", "retired"):
            restarts.labels(why).set_function(partial(_restarts, pool, why))
        ProcessCollector(registry=self.registry)


def _restarts(pool: Callable[[], VerifierPool], why: str) -> float:
    return pool().restarts[why]


def create_app(
    token: str, settings: VerifierSettings | None = None, home: Path | None = None
) -> FastAPI:
    """Builds the verifier's app, which has its own pool (`app.state.pool`) while it runs.

    home: directory of the local stack, which tasks may not read.
    """
    settings = settings or VerifierSettings()
    known_tasks = task_names()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.pool = VerifierPool(
            settings.workers,
            settings.deadline_s,
            memory_mb=settings.memory_mb,
            queue=settings.queue,
            readable=[path for path in settings.read.split(":") if path],
            hidden="" if home is None else str(home.resolve()),
        )
        yield
        await run_in_threadpool(app.state.pool.close)

    app = FastAPI(
        title="bapo verifier", version="1", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    install_problem_handlers(app)
    metrics = _Metrics(lambda: app.state.pool)
    _health_routes(app, metrics)

    router = APIRouter(route_class=GuardedRoute, prefix="/v1")

    @router.post(
        "/verify",
        tags=["verify"],
        dependencies=[Depends(SharedToken(token, largest_body=LARGEST_BODY))],
        responses={200: {"model": VerifyAnswer}},
        openapi_extra={"requestBody": _request_schema()},
    )
    async def verify(request: Request) -> Response:
        """Returns a verdict for every response, in order.

        A response that cannot be scored gets the reward 0 and a status that says why.
        """
        pool: VerifierPool = app.state.pool
        body = await request.body()
        try:
            # Off the event loop, which must answer /health while a large body is parsed.
            parsed, batch = await run_in_threadpool(_submit, pool, body, known_tasks)
            await _wait_for_batch(pool, batch, request)
        except Busy as error:
            metrics.refused.labels("busy").inc()
            answer = problem_response(429, "Busy", str(error))
            answer.headers["Retry-After"] = str(RETRY_AFTER_S)
            return answer
        except Draining as error:
            metrics.refused.labels("draining").inc()
            return problem_response(503, "Draining", str(error))
        except TaskRefused as error:
            return problem_response(422, "Invalid request", f"options: {error}")
        except PayloadError as error:
            return problem_response(422, "Invalid request", f"payload: {error}")
        except _ClientDisconnected:
            return Response(status_code=499)
        results = batch.done.result()
        for status, count in count_statuses(results).items():
            metrics.verdicts.labels(parsed.task, status).inc(count)
        return Response(answer_body(parsed, results), media_type="application/json")

    app.include_router(router)
    return app


def _health_routes(app: FastAPI, metrics: _Metrics) -> None:
    @app.get("/health", tags=["health"])
    async def health() -> dict[str, str]:
        """Answers while the process runs."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def ready() -> JSONResponse:
        """Checks that requests are accepted; 503 until a worker has started, and while draining."""
        if app.state.pool.ready():
            return JSONResponse({"status": "ready"})
        return problem_response(503, "Not ready", "the verifier is starting or shutting down")

    @app.get("/metrics", tags=["health"])
    async def show_metrics() -> Response:
        """Returns metrics in Prometheus's text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _submit(pool: VerifierPool, body: bytes, known_tasks: list[str]) -> tuple[VerifyRequest, Batch]:
    request = read_request(body, known_tasks)
    work = work_of(request)
    if len(work) > pool.queue:
        raise too_large(
            f"items: {len(work)} responses are more than the queue holds "
            f"(BAPO_VERIFIER_QUEUE = {pool.queue}); send fewer in a request"
        )
    return request, pool.submit(request.task, request.options, work)


async def _wait_for_batch(pool: VerifierPool, batch: Batch, request: Request) -> None:
    """Waits until every response is scored; abandons the batch when the client disconnects."""
    scoring = asyncio.wrap_future(batch.done)
    # The body has been read, so the next message can only be the disconnect.
    disconnect = asyncio.ensure_future(request.receive())
    try:
        either: set[asyncio.Future[Any]] = {scoring, disconnect}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise _ClientDisconnected
        scoring.result()
    finally:
        disconnect.cancel()
        if not scoring.done():
            pool.abandon(batch)


def _request_schema() -> dict[str, Any]:
    """Returns the body's schema for /docs, because the route reads the body itself."""
    schema = VerifyRequest.model_json_schema()
    schema["properties"]["items"]["items"] = VerifyItem.model_json_schema()
    schema.pop("$defs")
    return {"required": True, "content": {"application/json": {"schema": schema}}}


class _Server(Server):
    """Drains the pool before it stops listening, so that new requests get 503 meanwhile."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        pool = getattr(self.config.app.state, "pool", None)  # type: ignore[union-attr]
        if pool is None or not self._begin_drain():
            super().handle_exit(sig, frame)
            return

        def drain() -> None:
            pool.drain(DRAIN_TIMEOUT_S)
            Server.handle_exit(self, sig, frame)

        threading.Thread(target=drain, name="drain", daemon=True).start()

    _draining = False

    def _begin_drain(self) -> bool:
        """Returns True the first time, and False from then on."""
        first, self._draining = not self._draining, True
        return first


def main() -> None:
    configure_logs("verifier")
    hide_memory()

    def work() -> None:
        settings = VerifierServerSettings.load()
        app = create_app(settings.token.get_secret_value(), settings.verifier, settings.home)
        # Imported modules never become garbage; keep the collector from scanning them.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        serve(app, settings, _Server)

    run_until_error(work)


if __name__ == "__main__":
    main()
