"""Weights, checkpoints, replicas, and what the parts of a run did when."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from services.buffer import artifacts, replicas, runs, spans
from services.buffer.api import wire
from services.buffer.routes.common import LARGEST, Attempt, RunName, Step, Wait
from services.buffer.service import Service
from services.buffer.tokens import Guard
from services.common.errors import not_found

ReplicaName = Annotated[str, Path(pattern=wire.COMPONENT_NAME)]

AtStep = Annotated[int, Query(ge=1, le=LARGEST, description="A step of the trainer")]

Known = Annotated[str, Query(max_length=300, description="The `tag` of the answer before")]

Serving = Annotated[str, Query(max_length=64, description="Digest of the manifest of weights")]


def artifacts_router(service: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1/runs/{name}", tags=["artifacts"])
    _weight_routes(router, service, guard)
    _wanted_route(router, service, guard)
    _checkpoint_routes(router, service, guard)
    _replica_routes(router, service, guard)
    _activity_routes(router, service, guard)
    return router


def _weight_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.get("/weights", dependencies=read)
    def list_weights(name: RunName) -> list[wire.WeightView]:
        """Versions of the weights, newest first (the last thousand)."""
        with service.sessions() as session:
            return artifacts.list_weights(session, runs.get_run(session, name))

    @router.put("/weights/{version}", dependencies=run)
    def publish(
        name: RunName, version: Step, attempt: Attempt, body: wire.ManifestDigest
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


def _wanted_route(router: APIRouter, service: Service, guard: Guard) -> None:
    @router.get("/wanted", dependencies=guard("read"))
    async def wanted(name: RunName, known: Known = "", wait: Wait = 0) -> wire.TargetWeights:
        """What rollout replicas should serve. Waits while it is what `known` says."""

        def look() -> wire.TargetWeights:
            with service.sessions() as session:
                return artifacts.target_weights(session, runs.get_run(session, name))

        return await service.until(name, wait, look, lambda answer: answer.tag != known)


def _checkpoint_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.get("/checkpoints", dependencies=read)
    def list_checkpoints(name: RunName) -> list[wire.CheckpointView]:
        """The checkpoints that are kept, newest first."""
        with service.sessions() as session:
            return artifacts.list_checkpoints(session, runs.get_run(session, name))

    @router.put("/checkpoints/{step}", dependencies=run)
    def checkpoint(name: RunName, step: Step, attempt: Attempt, body: wire.ManifestDigest) -> None:
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
    async def list_replicas(
        name: RunName, serving: Serving = "", wait: Wait = 0
    ) -> list[wire.ReplicaView]:
        """Rollout engines, and what each has loaded. May wait until one serves given weights."""

        def look() -> list[wire.ReplicaView]:
            with service.sessions() as session:
                return replicas.list_replicas(session, runs.get_run(session, name))

        def served(replicas: list[wire.ReplicaView]) -> bool:
            return any(each.manifest_digest == serving for each in replicas)

        return await service.until(name, wait if serving else 0, look, served)

    @router.put("/replicas/{replica}", dependencies=run)
    def report(name: RunName, replica: ReplicaName, body: wire.ReplicaReport) -> None:
        """What an engine has loaded, as it says itself."""
        with service.changing(name) as session:
            replicas.record_heartbeat(session, runs.get_run(session, name), replica, body)


def _activity_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    @router.post("/spans", dependencies=guard("run"))
    def tell(name: RunName, body: wire.SpanBatch) -> None:
        """What a part of the run did, and when."""
        with service.sessions.begin() as session:
            spans.record_spans(session, runs.get_run(session, name), body)

    @router.get("/spans", dependencies=guard("read"))
    def list_spans(name: RunName, first_step: AtStep, last_step: AtStep) -> list[wire.SpanView]:
        """What all parts did while the trainer was at these steps, in order of time."""
        with service.sessions() as session:
            run = runs.get_run(session, name)
            return spans.list_spans(session, run, first_step, last_step)
