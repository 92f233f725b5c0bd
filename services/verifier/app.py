"""`python -m services.verifier.app`: the verifier on a port. Stateless.

| variable | default | meaning |
| --- | --- | --- |
| `BAPO_VERIFIER_WORKERS` | half of the cores, at least 1 | processes that score |
| `BAPO_VERIFIER_DEADLINE_S` | 5 | seconds that one response may take |
| `BAPO_VERIFIER_MEMORY_MB` | 1024 | MiB that one response may take |
| `BAPO_VERIFIER_QUEUE` | 65536 | responses under way or waiting; beyond it, 429 |

SIGTERM drains it: new work gets 503 and `/readyz` says no, what is under way is finished (within
`DRAIN_S`), then the workers are killed and it ends. A second SIGTERM ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
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

from bapo_core.tasks import task_names
from services.common.auth import require_shared_token
from services.common.errors import install_problem_handlers, problem_response
from services.common.logs import configure_logs
from services.common.process import run_until_error
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

DRAIN_S = 30.0
"""For what is under way when the verifier is told to stop. Kubernetes gives as long."""
RETRY_AFTER_S = 1
GARBAGE_AT = 100_000
"""New objects between two looks for cycles: a request of 8,192 responses makes as many at once."""


class _Gone(Exception):
    """The client has hung up."""


class _Metrics:
    """Of one app: several may live in a process."""

    def __init__(self, pool: Callable[[], VerifierPool]) -> None:
        self.registry = CollectorRegistry()
        self.verdicts = Counter(
            "bapo_verdicts", "Responses scored", ["task", "status"], registry=self.registry
        )
        self.refused = Counter(
            "bapo_verifier_refused", "Requests refused, by why", ["why"], registry=self.registry
        )
        waiting = Gauge(
            "bapo_verifier_waiting", "Responses under way or waiting", registry=self.registry
        )
        waiting.set_function(lambda: pool().waiting())
        restarts = Gauge(
            "bapo_verifier_restarts",
            "Worker processes replaced since the start, by why",
            ["why"],
            registry=self.registry,
        )
        for why in ("timeout", "crashed", "retired"):
            restarts.labels(why).set_function(partial(_restarts, pool, why))
        ProcessCollector(registry=self.registry)


def _restarts(pool: Callable[[], VerifierPool], why: str) -> float:
    return pool().restarts[why]


def create_app(token: str, settings: VerifierSettings | None = None) -> FastAPI:
    """The verifier with its own pool of processes, `app.state.pool` while it runs."""
    settings = settings or VerifierSettings()
    known_tasks = task_names()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.pool = VerifierPool(
            settings.workers,
            settings.deadline_s,
            memory_mb=settings.memory_mb,
            queue=settings.queue,
        )
        yield
        await run_in_threadpool(app.state.pool.close)

    app = FastAPI(title="bapo verifier", version="1", lifespan=lifespan)
    install_problem_handlers(app)
    metrics = _Metrics(lambda: app.state.pool)
    _health_routes(app, metrics)

    @app.post(
        "/v1/verify",
        tags=["verify"],
        dependencies=[Depends(require_shared_token(token))],
        responses={200: {"model": VerifyAnswer}},
        openapi_extra={"requestBody": _request_schema()},
    )
    async def verify(request: Request) -> Response:
        """A verdict for every response; one that cannot be scored gets reward 0, and says why."""
        pool: VerifierPool = app.state.pool
        body = await _body(request)
        try:
            # Off the event loop: a body of many MiB takes a while, and health must answer.
            parsed, batch = await run_in_threadpool(_submit, pool, body, known_tasks)
            await _finished(pool, batch, request)
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
        except _Gone:
            return Response(status_code=499)
        results = batch.done.result()
        for status, count in count_statuses(results).items():
            metrics.verdicts.labels(parsed.task, status).inc(count)
        return Response(answer_body(parsed, results), media_type="application/json")

    return app


def _health_routes(app: FastAPI, metrics: _Metrics) -> None:
    @app.get("/health", tags=["health"])
    async def health() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def ready() -> JSONResponse:
        """Whether it takes work: 503 until a worker has started, and while draining."""
        if app.state.pool.ready():
            return JSONResponse({"status": "ready"})
        return problem_response(503, "Not ready", "the verifier is starting or shutting down")

    @app.get("/metrics", tags=["health"])
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _body(request: Request) -> bytes:
    """The body, of which no more is held than is allowed."""
    problem = too_large(f"body: more than {LARGEST_BODY} bytes; send fewer responses at once")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > LARGEST_BODY:
        raise problem
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise problem
        parts.append(part)
    return b"".join(parts)


def _submit(pool: VerifierPool, body: bytes, known_tasks: list[str]) -> tuple[VerifyRequest, Batch]:
    request = read_request(body, known_tasks)
    work = work_of(request)
    if len(work) > pool.queue:
        raise too_large(
            f"items: {len(work)} responses, and only {pool.queue} may wait here "
            "(BAPO_VERIFIER_QUEUE); send fewer at once"
        )
    return request, pool.submit(request.task, request.options, work)


async def _finished(pool: VerifierPool, batch: Batch, request: Request) -> None:
    """Until every result is there. A client that hangs up takes its batch with it."""
    scoring = asyncio.wrap_future(batch.done)
    # The body has been read, so the next message can only be that the client has gone.
    gone = asyncio.ensure_future(request.receive())
    try:
        either: set[asyncio.Future[Any]] = {scoring, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise _Gone
        scoring.result()
    finally:
        gone.cancel()
        if not scoring.done():
            pool.abandon(batch)


def _request_schema() -> dict[str, Any]:
    """For /docs: the body is read by hand."""
    schema = VerifyRequest.model_json_schema()
    schema["properties"]["items"]["items"] = VerifyItem.model_json_schema()
    schema.pop("$defs")
    return {"required": True, "content": {"application/json": {"schema": schema}}}


class _Server(uvicorn.Server):
    """Drains before it stops to listen, so that clients are told where things stand."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        pool = getattr(self.config.app.state, "pool", None)  # type: ignore[union-attr]
        if pool is None or not self._begin_drain():
            super().handle_exit(sig, frame)
            return

        def drain() -> None:
            pool.drain(DRAIN_S)
            uvicorn.Server.handle_exit(self, sig, frame)

        threading.Thread(target=drain, name="drain", daemon=True).start()

    _drains = False

    def _begin_drain(self) -> bool:
        """False from the second time on."""
        first, self._drains = not self._drains, True
        return first


def main() -> None:
    configure_logs("verifier")

    def work() -> None:
        settings = VerifierServerSettings.load()
        app = create_app(settings.token.get_secret_value(), settings.verifier)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        gc.freeze()  # what is imported stays; the collector need not visit it
        gc.set_threshold(GARBAGE_AT)
        _Server(config).run()

    run_until_error(work)


if __name__ == "__main__":
    main()
