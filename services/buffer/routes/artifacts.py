"""Weights, checkpoints and replicas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from services.buffer import artifacts, queries, runs, wire
from services.buffer.routes.common import Attempt, RunName, Step, Wait
from services.buffer.service import Service
from services.buffer.tokens import Guard
from services.common.errors import not_found

ReplicaName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


def artifacts_router(service: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1/runs/{name}", tags=["artifacts"])
    _weight_routes(router, service, guard)
    _checkpoint_routes(router, service, guard)
    _replica_routes(router, service, guard)
    return router


def _weight_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.get("/weights", dependencies=read)
    def list_weights(name: RunName) -> list[wire.WeightView]:
        """Versions of the weights, newest first (the last thousand)."""
        with service.sessions() as session:
            return queries.weights(session, runs.get_run(session, name))

    @router.put("/weights/{version}", dependencies=run)
    def publish(
        name: RunName, version: Step, attempt: Attempt, body: wire.Manifested
    ) -> wire.StoredVersion:
        """Makes a version exist: its objects are written, its manifest last."""
        with service.changing(name) as session:
            row = runs.lock_run(session, name, attempt)
            return artifacts.publish_weights(session, row, version, body.manifest_digest)

    @router.get("/weights/{version}", dependencies=read)
    async def weights(name: RunName, version: Step, wait: Wait = 0) -> wire.StoredVersion:
        """Where a version is, and the digest of its manifest."""

        def look() -> wire.StoredVersion | None:
            with service.sessions() as session:
                return artifacts.get_weights(session, runs.get_run(session, name), version)

        found = await service.until(name, wait, look, lambda stored: stored is not None)
        if found is None:
            raise not_found(f"version {version} of run {name!r} yet")
        return found


def _checkpoint_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.get("/checkpoints", dependencies=read)
    def list_checkpoints(name: RunName) -> list[wire.CheckpointView]:
        """The checkpoints that are kept, newest first."""
        with service.sessions() as session:
            return queries.checkpoints(session, runs.get_run(session, name))

    @router.put("/checkpoints/{step}", dependencies=run)
    def checkpoint(name: RunName, step: Step, attempt: Attempt, body: wire.Manifested) -> None:
        """Makes a checkpoint exist, and deletes what it makes unneeded."""
        with service.changing(name) as session:
            row = runs.lock_run(session, name, attempt)
            unneeded = artifacts.record_checkpoint(session, row, step, body.manifest_digest)
        for prefix in unneeded:
            service.store.delete(service.store.keys(f"{prefix}/"))

    @router.get("/checkpoints/latest", dependencies=read)
    def latest(name: RunName) -> wire.StoredVersion | None:
        """The checkpoint that a new attempt starts from; null before the first."""
        with service.sessions() as session:
            return artifacts.latest_checkpoint(session, runs.get_run(session, name))


def _replica_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.get("/replicas", dependencies=read)
    def list_replicas(name: RunName) -> list[wire.ReplicaView]:
        """Rollout engines, and what each has loaded."""
        with service.sessions() as session:
            return queries.replicas(session, runs.get_run(session, name))

    @router.put("/replicas/{replica}", dependencies=run)
    def report(name: RunName, replica: ReplicaName, body: wire.ReplicaReport) -> None:
        """What an engine has loaded, as it says itself."""
        with service.sessions.begin() as session:
            artifacts.report_replica(session, runs.get_run(session, name), replica, body)
