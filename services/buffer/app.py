"""The application of the buffer service: its routes, its state and its error handlers."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool

from services.buffer.api import wire
from services.buffer.database import describe_outage, make_engine, may_be_repeated
from services.buffer.migrate import upgrade
from services.buffer.routes import (
    admin,
    artifacts,
    configs,
    dashboard,
    datasets,
    images,
    queries,
    reward_files,
    runs,
    steps,
)
from services.buffer.routes.common import ERRORS
from services.buffer.runs import tokens
from services.buffer.service import Service
from services.common.auth import FailureLimiter
from services.common.errors import first_line
from services.common.middleware import EntityTags, RootPath
from services.common.objectstore import ObjectStore, ObjectStoreError, ObjectStoreUnavailable
from services.common.problems import install_problem_handlers, problem_response, unavailable
from services.common.scopes import Scope

log = logging.getLogger(__name__)

BUCKET_WITHIN_S = 5.0
"""Seconds to wait for the bucket before the service answers without one."""
BUCKET_FIRST_RETRY_S, BUCKET_RETRY_S = 0.1, 2.0
"""Seconds between attempts to create the bucket: the first, and the largest after doubling. An
object store that is started together with the service answers within a few seconds."""

DESCRIPTION = """\
Owns all state of a run: prompts and their difficulty, groups, buffers, batches, checkpoints.

Every route but /health, /readyz and /metrics needs `Authorization: Bearer <token>`. Errors are
problem details (RFC 9457). Lists are pages: pass a page's `next` as `cursor` to get the next one.
JSON answers to GET carry an ETag: with `If-None-Match`, an unchanged one is 304 without a body.
"""


def create_app(
    database_url: str,
    store: ObjectStore,
    configured_tokens: Mapping[Scope, str],
    root_path: str | None = None,
) -> FastAPI:
    """Builds the application. When it starts, it migrates the database, accepts
    `configured_tokens`, one for each scope, and creates the bucket if it does not exist, which may
    take until the object store answers.

    root_path: path below which the application is served as well, such as `/team/bapo`.
    """
    engine = make_engine(database_url, pool_size=16, max_overflow=32, pool_pre_ping=True)
    service = Service(engine, store)

    @asynccontextmanager
    async def lifespan(_: FastAPI):  # type: ignore[no-untyped-def]
        upgrade(database_url)
        # Routes that need the database alone are served meanwhile; /readyz says what is missing.
        creating = asyncio.create_task(_create_bucket(service))
        await asyncio.wait([creating], timeout=BUCKET_WITHIN_S)
        with service.sessions.begin() as session:
            tokens.accept_configured(session, configured_tokens)
        service.use_loop(asyncio.get_running_loop())
        # `gc.freeze()`: imported modules never become garbage; keep the garbage collector from
        # scanning them.
        gc.collect()
        gc.freeze()
        yield
        creating.cancel()
        engine.dispose()

    app = FastAPI(
        title="bapo buffer service",
        version="1",
        lifespan=lifespan,
        description=DESCRIPTION,
        # Their pages would run scripts of other hosts; /docs is a page of the dashboard's files.
        docs_url=None,
        redoc_url=None,
    )
    install_problem_handlers(app, {wire.RUN_NAME: wire.RUN_NAME_RULE})
    _install_outage_handlers(app)
    app.state.service = service
    app.state.token_failures = FailureLimiter()
    app.include_router(admin.health_router)
    app.include_router(dashboard.router)
    for router in (
        configs.router,
        datasets.router,
        images.router,
        reward_files.router,
        runs.router,
        steps.router,
        artifacts.router,
        queries.router,
        admin.scope_router,
        admin.admin_router,
    ):
        app.include_router(router, responses=ERRORS)
    app.add_middleware(EntityTags)
    if root_path is not None:
        app.add_middleware(RootPath, root_path=root_path)
    return app


async def _create_bucket(service: Service) -> None:
    """Creates the bucket unless it exists; tries again until the object store answers.

    Then warns of what a run will need and the keys may not do: deletions begin after hours.
    """
    pause = BUCKET_FIRST_RETRY_S
    while True:
        try:
            await run_in_threadpool(service.probe.ensure_bucket)
        except ObjectStoreError as error:
            if pause == BUCKET_RETRY_S:
                log.warning("the bucket cannot be created yet: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, BUCKET_RETRY_S)
        else:
            break
    try:
        await run_in_threadpool(service.store.try_operations)
    except ObjectStoreError as error:
        log.warning("the object store cannot be used as runs use it: %s", error)


def _install_outage_handlers(app: FastAPI) -> None:
    """Answers 503 while Postgres or the object store does not answer, so that clients repeat the
    call; 422 for values that Postgres cannot hold, and 507 for what the object store refuses."""

    @app.exception_handler(DBAPIError)
    async def _database_failed(_: Request, error: DBAPIError) -> Response:
        if not may_be_repeated(error):
            raise error
        return unavailable(f"the database cannot serve the call: {describe_outage(error)}")

    @app.exception_handler(PoolTimeout)
    async def _no_connection(_: Request, error: PoolTimeout) -> Response:
        return unavailable(f"no connection to the database became free: {first_line(error)}")

    @app.exception_handler(DataError)
    async def _invalid_value(_: Request, error: DataError) -> Response:
        reason = first_line(error.orig or error)
        return problem_response(422, "Invalid request", f"the database cannot hold it: {reason}")

    @app.exception_handler(UnicodeEncodeError)
    async def _invalid_text(_: Request, error: UnicodeEncodeError) -> Response:
        character = error.object[error.start : error.start + 1]
        detail = f"a text holds {character!r}, which is half a character; send whole ones"
        return problem_response(422, "Invalid request", detail)

    @app.exception_handler(ObjectStoreUnavailable)
    async def _store_unavailable(_: Request, error: ObjectStoreUnavailable) -> Response:
        return unavailable(str(error))

    @app.exception_handler(ObjectStoreError)
    async def _store_failed(_: Request, error: ObjectStoreError) -> Response:
        return problem_response(507, "Object store", str(error))
