"""Health, tokens and garbage collection."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from services.buffer.api import wire
from services.buffer.database import STANDBY, describe_outage
from services.buffer.queries import metrics
from services.buffer.routes.common import LARGEST
from services.buffer.runs import tokens
from services.buffer.runs.tokens import permit
from services.buffer.service import Service, ServiceDep
from services.buffer.storage import garbage
from services.common.guard import GuardedRoute
from services.common.objectstore import ObjectStoreError
from services.common.scopes import SCOPES

log = logging.getLogger(__name__)
health_router = APIRouter(tags=["health"])
scope_router = APIRouter(route_class=GuardedRoute, prefix="/v1", tags=["admin"])
admin_router = APIRouter(
    route_class=GuardedRoute, prefix="/v1", tags=["admin"], dependencies=permit("admin")
)


# ---- health -------------------------------------------------------------------------------------


@health_router.get("/health")
def health() -> dict[str, str]:
    """Answers as long as the process runs, whatever its dependencies do (see `/readyz`)."""
    return {"status": "ok"}


@health_router.get("/readyz", responses={503: {"model": wire.Readiness}})
def readyz(service: ServiceDep, response: Response) -> wire.Readiness:
    """Checks that Postgres takes writes and that the object store answers; 503 otherwise."""
    database, store = _check_database(service), _check_object_store(service)
    ready = database == store == "ok"
    response.status_code = 200 if ready else 503
    return wire.Readiness(ready=ready, database=database, object_store=store)


@health_router.get("/metrics", response_class=PlainTextResponse)
def show_metrics(service: ServiceDep) -> Response:
    """Returns metrics of this process and of the runs in the text format of Prometheus.

    Those of the runs are absent while the database does not answer.
    """
    page = generate_latest()
    try:
        with service.sessions() as session:
            page += metrics.run_metrics(session)
    except SQLAlchemyError as error:
        log.warning("the metrics of the runs are left out: %s", error)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


def _check_database(service: Service) -> str:
    try:
        with service.sessions() as session:
            read_only = session.scalar(text("show transaction_read_only")) == "on"
            if read_only:
                session.connection().invalidate()
    except SQLAlchemyError as error:
        return f"does not answer: {describe_outage(error)}"
    if read_only:
        return f"takes no writes; {STANDBY}"
    full = service.outages.full()
    return "ok" if full is None else f"has refused a write: {full}"


def _check_object_store(service: Service) -> str:
    try:
        service.probe.check()
    except ObjectStoreError as error:
        return str(error)
    return "ok"


# ---- tokens -------------------------------------------------------------------------------------


@scope_router.get("/token", dependencies=permit(*SCOPES, of_no_run=True))
def token_scope(request: Request) -> wire.TokenScope:
    """Returns the scope of the request's token, so that a page offers only what it allows."""
    token: tokens.AcceptedToken = request.state.token
    return wire.TokenScope(scope=token.scope, run=token.run)


@admin_router.post("/tokens", status_code=201)
def create_token(service: ServiceDep, request: wire.TokenCreate) -> wire.TokenCreated:
    """Creates a token. Its secret is shown only in this response."""
    with service.sessions.begin() as session:
        return tokens.create(session, request)


@admin_router.get("/tokens")
def list_tokens(service: ServiceDep) -> list[wire.TokenView]:
    """Lists all tokens ever created, revoked ones included, without their secrets."""
    with service.sessions() as session:
        return tokens.list_tokens(session)


@admin_router.delete("/tokens/{token_id}")
def revoke_token(
    service: ServiceDep, token_id: Annotated[int, Path(ge=1, le=LARGEST)]
) -> wire.TokenView:
    """Revokes a token with immediate effect."""
    with service.sessions.begin() as session:
        return tokens.revoke(session, token_id)


# ---- garbage ------------------------------------------------------------------------------------


@admin_router.post("/gc")
def collect_garbage(service: ServiceDep, dry_run: bool = True) -> wire.Garbage:
    """Lists objects that no row refers to, and deletes them with `dry_run=false`.

    Objects younger than a day are never deleted: their rows may be about to be written.
    """
    return garbage.collect_garbage(service, dry_run=dry_run)
