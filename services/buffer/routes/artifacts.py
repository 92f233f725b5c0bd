"""Weights, checkpoints, rollout replicas and spans."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Path, Query

from services.buffer.api import wire
from services.buffer.routes.common import LARGEST, Attempt, RunName, Step, Version, Wait
from services.buffer.runs import replicas, runs, spans
from services.buffer.runs.tokens import permit
from services.buffer.service import Service, ServiceDep
from services.buffer.storage import artifacts
from services.common.guard import GuardedRoute
from services.common.objectstore import discard
from services.common.problems import not_found

READ, TRAINER = permit("read"), permit("trainer")

ReplicaName = Annotated[str, Path(pattern=wire.COMPONENT_NAME)]
TrainerStep = Annotated[int, Query(ge=1, le=LARGEST, description="Step of the trainer")]
Known = Annotated[str, Query(max_length=300, description="`tag` of the previous answer")]
Serving = Annotated[str, Query(max_length=64, description="Manifest digest of weights")]

router = APIRouter(route_class=GuardedRoute, prefix="/v1/runs/{name}", tags=["artifacts"])


# ---- weights ------------------------------------------------------------------------------------


@router.get("/weights", dependencies=READ)
def list_weights(service: ServiceDep, name: RunName) -> list[wire.WeightView]:
    """Lists policy versions that were published, newest first, at most a thousand."""
    with service.sessions() as session:
        return artifacts.list_weights(runs.get_run(session, name))


@router.put("/weights/{version}", dependencies=TRAINER)
def publish_weights(
    service: ServiceDep,
    name: RunName,
    version: Version,
    attempt: Attempt,
    body: wire.ManifestDigest,
    afterwards: BackgroundTasks,
) -> wire.StoredVersion:
    """Publishes a policy version whose files and manifest are in the object store.

    Publishing it again with the same digest changes nothing; another digest gets 409.
    """
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        stored, unneeded = artifacts.publish_weights(run, version, body.manifest_digest)
    afterwards.add_task(discard, service.store, unneeded)
    return stored


@router.get("/weights/{version}", dependencies=permit("read", "collector", "trainer"))
async def get_weights(
    service: ServiceDep, name: RunName, version: Version, wait: Wait = 0
) -> wire.StoredVersion:
    """Returns where a policy version is stored; 404 unless it is published within `wait`."""

    def read() -> wire.StoredVersion | None:
        with service.sessions() as session:
            return artifacts.get_weights(runs.get_run(session, name), version)

    stored = await service.wait_until(name, wait, read, lambda stored: stored is not None)
    if stored is None:
        raise not_found(f"version {version} of run {name!r} yet")
    return stored


@router.get("/target", dependencies=permit("read", "replica"))
async def get_target_weights(
    service: ServiceDep, name: RunName, known: Known = "", wait: Wait = 0
) -> wire.TargetWeights:
    """Returns the weights that rollout replicas should serve. Waits while `known` is current."""

    def read() -> wire.TargetWeights:
        with service.sessions() as session:
            return artifacts.target_weights(runs.get_run(session, name))

    return await service.wait_until_shared(name, wait, read, lambda target: target.tag != known)


# ---- checkpoints --------------------------------------------------------------------------------


@router.get("/checkpoints", dependencies=permit("read", "collector"))
def list_checkpoints(service: ServiceDep, name: RunName) -> list[wire.CheckpointView]:
    """Lists the checkpoints that are kept, newest first."""
    with service.sessions() as session:
        return artifacts.list_checkpoints(runs.get_run(session, name))


@router.put("/checkpoints/{step}", dependencies=TRAINER)
def record_checkpoint(
    service: ServiceDep,
    name: RunName,
    step: Step,
    attempt: Attempt,
    body: wire.ManifestDigest,
    afterwards: BackgroundTasks,
) -> None:
    """Records a checkpoint whose files are in the object store.

    Recording it again with the same digest changes nothing; another digest gets 409. Deletes
    checkpoints and policy versions that the run's retention rules no longer keep.
    """
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        unneeded = artifacts.record_checkpoint(run, step, body.manifest_digest)
    afterwards.add_task(discard, service.store, unneeded)


@router.get("/checkpoints/latest", dependencies=permit("read", "trainer"))
def latest_checkpoint(service: ServiceDep, name: RunName) -> wire.StoredVersion | None:
    """Returns the checkpoint from which a new attempt starts; null before the first."""
    with service.sessions() as session:
        return artifacts.latest_checkpoint(runs.get_run(session, name))


# ---- replicas -----------------------------------------------------------------------------------


@router.get("/replicas", dependencies=READ)
async def list_replicas(
    service: ServiceDep, name: RunName, serving: Serving = "", wait: Wait = 0
) -> list[wire.ReplicaView]:
    """Lists rollout replicas and the weights they have loaded.

    With `serving`, waits until one of them has loaded the weights with this digest and is alive.
    """
    found = await _find_replicas(service, name, serving, wait)
    return [wire.ReplicaView(**view.model_dump(exclude={"credential"})) for view in found]


@router.get("/replicas/credentials", dependencies=permit("collector", "trainer"))
async def list_callable_replicas(
    service: ServiceDep, name: RunName, serving: Serving = "", wait: Wait = 0
) -> list[wire.CallableReplica]:
    """Lists rollout replicas as `GET …/replicas` does, with the token that each requires."""
    return await _find_replicas(service, name, serving, wait)


async def _find_replicas(
    service: Service, name: str, serving: str, wait: float
) -> list[wire.CallableReplica]:
    def read() -> list[wire.CallableReplica]:
        with service.sessions() as session:
            return replicas.list_replicas(runs.get_run(session, name))

    def served(replicas: list[wire.CallableReplica]) -> bool:
        return any(
            replica.manifest_digest == serving and replica.silent_s < wire.HEARTBEAT_TIMEOUT_S
            for replica in replicas
        )

    return await service.wait_until(name, wait if serving else 0, read, served)


@router.put("/replicas/{replica}", dependencies=permit("replica"))
def report_replica(
    service: ServiceDep, name: RunName, replica: ReplicaName, body: wire.ReplicaHeartbeat
) -> None:
    """Records the state that a rollout replica reports; the report is its heartbeat, too."""
    with service.sessions.begin() as session:
        changed = replicas.record_heartbeat(runs.get_run(session, name), replica, body)
    # Every replica reports every two seconds, which would make every waiting request read again.
    if changed:
        service.wake_waiting(name)


# ---- spans --------------------------------------------------------------------------------------


@router.post("/spans", dependencies=permit("replica", "collector", "trainer"))
def record_spans(service: ServiceDep, name: RunName, body: wire.SpanBatch) -> None:
    """Records spans of a component, each once, however often it is sent."""
    with service.sessions.begin() as session:
        spans.record_spans(runs.get_run(session, name), body)


@router.get("/spans", dependencies=READ)
def list_spans(
    service: ServiceDep, name: RunName, first_step: TrainerStep, last_step: TrainerStep
) -> list[wire.SpanView]:
    """Lists the spans of all components while the trainer was at these steps, by time."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
        return spans.list_spans(run, first_step, last_step)
