"""Health, tokens and garbage."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from services.buffer import garbage, tokens
from services.buffer.api import wire
from services.buffer.routes.common import LARGEST
from services.buffer.service import Service
from services.buffer.tokens import Guard
from services.common.objectstore import ObjectStoreError


def health_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health")
    def health() -> dict[str, str]:
        """Whether the process lives. It says nothing of what the process needs: see /readyz."""
        return {"status": "ok"}

    @router.get("/readyz", responses={503: {"model": wire.Readiness}})
    def readyz(response: Response) -> wire.Readiness:
        """Whether Postgres and the object store answer; 503 while one of them does not."""
        database, store = _database(service), _object_store(service)
        ready = database == store == "ok"
        response.status_code = 200 if ready else 503
        return wire.Readiness(ready=ready, database=database, object_store=store)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router


def _database(service: Service) -> str:
    try:
        with service.sessions() as session:
            session.execute(select(1))
    except SQLAlchemyError as error:
        return f"does not answer: {type(error).__name__}"
    return "ok"


def _object_store(service: Service) -> str:
    try:
        service.probe.check()
    except ObjectStoreError as error:
        return str(error)
    return "ok"


def scope_router(_: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["admin"])

    @router.get("/token", dependencies=guard("read"))
    def scope(request: Request) -> wire.TokenScope:
        """The scope of the token in use, so that a page offers only what it may do."""
        return wire.TokenScope(scope=request.state.scope)

    return router


def admin_router(service: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["admin"], dependencies=guard("admin"))

    @router.post("/tokens", status_code=201)
    def create_token(request: wire.TokenCreate) -> wire.TokenCreated:
        """Makes a token. It is shown in this answer and never again."""
        with service.sessions.begin() as session:
            return tokens.create(session, request)

    @router.get("/tokens")
    def list_tokens() -> list[wire.TokenView]:
        """All tokens ever made, without their secrets."""
        with service.sessions() as session:
            return tokens.listing(session)

    @router.delete("/tokens/{token_id}")
    def revoke_token(token_id: Annotated[int, Path(ge=1, le=LARGEST)]) -> wire.TokenView:
        """Revokes a token, at once."""
        with service.sessions.begin() as session:
            return tokens.revoke(session, token_id)

    @router.post("/gc")
    def gc(dry_run: bool = True) -> wire.Garbage:
        """Objects that no row points to; deletes them with `dry_run=false`.

        An object younger than a day is never deleted: its row may be about to be written.
        """
        return garbage.collect_garbage(service, dry_run=dry_run)

    return router
