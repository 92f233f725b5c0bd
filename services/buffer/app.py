"""The routes of the buffer service. They translate; the work is in the modules below them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.params import Depends as DependsParameter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, generate_latest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool

from services.buffer import artifacts, queries, runs, steps, wire
from services.buffer.migrate import upgrade
from services.buffer.tables import ApiToken, Run
from services.buffer.trajectories import (
    PROXIMAL_SCHEMA,
    SCHEMA,
    TrajectoryError,
    decode_groups,
    groups_of,
    read_table,
)
from services.common.auth import bearer_token, covers, hash_token
from services.common.errors import (
    Problem,
    bad_request,
    install_problem_handlers,
    not_found,
    problem_response,
)
from services.common.objectstore import ObjectStore, ObjectStoreError

LONGEST_WAIT_S = 30.0
RECHECK_S = 0.5
"""Another replica of this service may have changed the state, so waits look again this often."""

GROUPS = Counter("bapo_groups_accepted", "Groups accepted", ["run", "kind"])
COMMITS = Gauge("bapo_current_step", "Last committed step", ["run"])

T = TypeVar("T")
Attempt = Annotated[int, Header(alias="X-Bapo-Attempt", description="Fencing number of the run")]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait until ready")]


class Service:
    """The database, the object store, and the news that something has changed."""

    def __init__(self, engine: Engine, store: ObjectStore) -> None:
        self.store = store
        self.sessions = sessionmaker(engine, expire_on_commit=False)
        self._changed = threading.Condition()
        self._version = 0

    @contextmanager
    def changing(self) -> Iterator[Session]:
        """A transaction; whoever waits looks again after its commit."""
        with self.sessions.begin() as session:
            yield session
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def until(self, seconds: float, attempt: Callable[[], T], ready: Callable[[T], bool]) -> T:
        """The first ready result of `attempt`, or its last one when the time is up."""
        deadline = monotonic() + seconds
        while True:
            seen = self._version
            result = attempt()
            left = deadline - monotonic()
            if ready(result) or left <= 0:
                return result
            with self._changed:
                if self._version == seen:
                    self._changed.wait(min(left, RECHECK_S))


def create_app(database_url: str, store: ObjectStore, admin_token: str) -> FastAPI:
    """The service, its schema brought up to date and `admin_token` accepted."""
    engine = create_engine(database_url, pool_size=16, max_overflow=32, pool_pre_ping=True)

    @asynccontextmanager
    async def lifespan(_: FastAPI):  # type: ignore[no-untyped-def]
        upgrade(database_url)
        store.ensure_bucket()
        with engine.begin() as connection:
            connection.execute(
                insert(ApiToken)
                .values(hash=hash_token(admin_token), scope="admin")
                .on_conflict_do_nothing(index_elements=["hash"])
            )
        yield
        engine.dispose()

    app = FastAPI(
        title="bapo buffer service",
        version="1",
        lifespan=lifespan,
        description="Owns all state of a run: prompts, groups, buffers, batches, difficulty.",
    )
    install_problem_handlers(app)
    service = Service(engine, store)

    @app.exception_handler(ObjectStoreError)
    async def _store_failed(_: Request, error: ObjectStoreError) -> Response:
        return problem_response(507, "Object store", str(error))

    _health_routes(app, service)
    _run_routes(app, service)
    _step_routes(app, service)
    _artifact_routes(app, service)
    _reading_routes(app, service)
    return app


def _scope(service: Service, wanted: str) -> list[DependsParameter]:
    def check(request: Request) -> None:
        hashed = hash_token(bearer_token(request))
        with service.sessions.begin() as session:
            token = session.scalar(select(ApiToken).where(ApiToken.hash == hashed))
            if token is None:
                raise Problem(401, "Unauthorized", "this token is not known here")
            now = datetime.now(UTC)
            # To the minute is enough, and spares a write for every request.
            if token.last_used_at is None or now - token.last_used_at > timedelta(minutes=1):
                token.last_used_at = now
        if not covers(token.scope, wanted):
            raise Problem(
                403, "Forbidden", f"this needs scope {wanted!r}, the token has {token.scope!r}"
            )

    return [Depends(check)]


def _health_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["health"])
    def health() -> dict[str, str]:
        with service.sessions() as session:
            session.execute(select(1))
        return {"status": "ok"}

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _run_routes(app: FastAPI, service: Service) -> None:
    run, read = _scope(service, "run"), _scope(service, "read")

    @app.post("/v1/datasets/{dataset}", tags=["datasets"], dependencies=run)
    def upload(dataset: str, upload: wire.DatasetUpload) -> wire.DatasetState:
        with service.changing() as session:
            return runs.upload_prompts(session, dataset, upload)

    @app.get("/v1/datasets/{dataset}", tags=["datasets"], dependencies=read)
    def dataset_state(dataset: str) -> wire.DatasetState:
        with service.sessions() as session:
            return wire.DatasetState(dataset=dataset, prompts=runs.dataset_size(session, dataset))

    @app.post("/v1/runs", tags=["runs"], dependencies=run)
    def create(request: wire.RunCreate) -> wire.RunState:
        with service.changing() as session:
            return runs.run_state(runs.create_run(session, request))

    @app.get("/v1/runs", tags=["runs"], dependencies=read)
    def list_runs() -> list[wire.RunState]:
        with service.sessions() as session:
            return [runs.run_state(row) for row in session.scalars(select(Run).order_by(Run.id))]

    @app.get("/v1/runs/{name}", tags=["runs"], dependencies=read)
    def show(name: str) -> wire.RunState:
        with service.sessions() as session:
            return runs.run_state(runs.get_run(session, name))

    @app.patch("/v1/runs/{name}", tags=["runs"], dependencies=run)
    def patch(name: str, change: wire.RunPatch, attempt: Attempt) -> wire.RunState:
        with service.changing() as session:
            row = runs.lock_run(session, name, attempt)
            row.status = change.status
            return runs.run_state(row)

    @app.post("/v1/runs/{name}/attempts", tags=["runs"], dependencies=run)
    def begin_attempt(name: str) -> wire.RunState:
        """Supersedes every process that works on the run; rewinds to the last checkpoint."""
        with service.changing() as session:
            return runs.run_state(artifacts.begin_attempt(session, name))


def _step_routes(app: FastAPI, service: Service) -> None:
    run = _scope(service, "run")

    @app.post("/v1/runs/{name}/steps/{step}/prompts", tags=["steps"], dependencies=run)
    def prompts(
        name: str,
        step: int,
        attempt: Attempt,
        kind: wire.Kind = "fresh",
        generation_round: Annotated[int, Query(ge=0)] = 0,
        wait: Wait = 0,
    ) -> wire.StepPrompts:
        """The prompts to roll out at this step."""

        def look() -> wire.StepPrompts:
            with service.sessions.begin() as session:
                row = runs.get_run(session, name)
                runs.check_attempt(row, attempt)
                return steps.step_prompts(session, row, step, kind, generation_round)

        return service.until(wait, look, lambda answer: answer.ready)

    @app.post("/v1/runs/{name}/steps/{step}/groups", tags=["steps"], dependencies=run)
    async def groups(
        request: Request, name: str, step: int, attempt: Attempt, kind: wire.Kind = "fresh"
    ) -> wire.GroupsAccepted:
        """Whole groups as an Arrow IPC stream. A group lands once, however often it is sent."""
        body = await request.body()
        return await _in_thread(_accept_groups, service, name, step, attempt, kind, body)

    @app.post("/v1/runs/{name}/steps/{step}/batch", tags=["steps"], dependencies=run)
    def batch(name: str, step: int, attempt: Attempt, wait: Wait = 0) -> wire.BatchManifest:
        """The training batch, built once all groups of the step have landed."""

        def build() -> wire.BatchManifest:
            with service.sessions.begin() as session:
                return steps.build(session, runs.lock_run(session, name, attempt), step)

        return service.until(wait, build, lambda manifest: manifest.ready)

    @app.post("/v1/runs/{name}/steps/{step}/proximal", tags=["steps"], dependencies=run)
    async def proximal(request: Request, name: str, step: int, attempt: Attempt) -> None:
        """Log-probs of the trainer at this step for groups that may be replayed (Arrow)."""
        body = await request.body()
        await _in_thread(_accept_proximal, service, name, step, attempt, body)

    @app.post("/v1/runs/{name}/steps/{step}/commit", tags=["steps"], dependencies=run)
    def commit(name: str, step: int, attempt: Attempt, body: wire.Commit) -> wire.RunState:
        """Closes the step, once."""
        with service.changing() as session:
            row = runs.lock_run(session, name, attempt)
            steps.commit(session, row, step, body.metrics)
            COMMITS.labels(name).set(row.current_step)
            return runs.run_state(row)

    @app.post("/v1/runs/{name}/rewind", tags=["steps"], dependencies=run)
    def rewind(name: str, attempt: Attempt, body: wire.Rewind) -> wire.RunState:
        """Undoes everything after a step, exactly."""
        with service.changing() as session:
            row = runs.lock_run(session, name, attempt)
            steps.rewind(session, row, body.step)
            return runs.run_state(row)


def _accept_groups(
    service: Service, name: str, step: int, attempt: int, kind: wire.Kind, body: bytes
) -> wire.GroupsAccepted:
    try:
        found = decode_groups(body)
    except TrajectoryError as error:
        raise bad_request(f"the body is refused: {error}") from error
    if len({group.prompt_uid for group in found}) != len(found):
        raise bad_request("the body is refused: a prompt has more than one group")
    with service.sessions.begin() as session:
        row = runs.get_run(session, name)
        runs.check_attempt(row, attempt)
        prefix = artifacts.run_prefix(row)
        indexes = steps.new_groups(session, row, step, kind, found)
    digest = hashlib.sha256(body).hexdigest()
    # The name holds the content's digest: a retry or a rival writes another object or the same
    # bytes, never other bytes under a name that a row points to.
    key = f"{prefix}/trajectories/step={step}/{kind}-{digest[:16]}.arrow"
    if indexes:
        service.store.put(key, body)
    with service.changing() as session:
        row = runs.lock_run(session, name, attempt)
        indexes = steps.new_groups(session, row, step, kind, found)
        steps.record_groups(session, row, step, kind, found, indexes, key, digest)
        session.flush()
        complete = not steps.groups_complete(session, row, step, kind)
    GROUPS.labels(name, kind).inc(len(indexes))
    return wire.GroupsAccepted(
        accepted=len(indexes), duplicates=len(found) - len(indexes), complete=complete
    )


def _accept_proximal(service: Service, name: str, step: int, attempt: int, body: bytes) -> None:
    try:
        group_ids = set(read_table(body, PROXIMAL_SCHEMA)["group_id"].to_pylist())
    except TrajectoryError as error:
        raise bad_request(f"the body is refused: {error}") from error
    digest = hashlib.sha256(body).hexdigest()
    with service.sessions.begin() as session:
        prefix = artifacts.run_prefix(runs.get_run(session, name))
    key = f"{prefix}/trajectories/step={step}/proximal-{digest[:16]}.arrow"
    service.store.put(key, body)
    with service.changing() as session:
        row = runs.lock_run(session, name, attempt)
        steps.record_proximal(session, row, step, sorted(group_ids), key, digest)


def _artifact_routes(app: FastAPI, service: Service) -> None:
    run, read = _scope(service, "run"), _scope(service, "read")

    @app.put("/v1/runs/{name}/weights/{version}", tags=["weights"], dependencies=run)
    def publish(
        name: str, version: int, attempt: Attempt, body: wire.Manifested
    ) -> wire.StoredVersion:
        """Makes a version exist: its objects are written, its manifest last."""
        with service.changing() as session:
            row = runs.lock_run(session, name, attempt)
            return artifacts.publish_weights(session, row, version, body.manifest_digest)

    @app.get("/v1/runs/{name}/weights/{version}", tags=["weights"], dependencies=read)
    def weights(name: str, version: int, wait: Wait = 0) -> wire.StoredVersion:
        def look() -> wire.StoredVersion | None:
            with service.sessions() as session:
                return artifacts.get_weights(session, runs.get_run(session, name), version)

        found = service.until(wait, look, lambda stored: stored is not None)
        if found is None:
            raise not_found(f"version {version} of run {name!r} yet")
        return found

    @app.put("/v1/runs/{name}/checkpoints/{step}", tags=["checkpoints"], dependencies=run)
    def checkpoint(name: str, step: int, attempt: Attempt, body: wire.Manifested) -> None:
        with service.changing() as session:
            row = runs.lock_run(session, name, attempt)
            unneeded = artifacts.record_checkpoint(session, row, step, body.manifest_digest)
        for prefix in unneeded:
            service.store.delete(service.store.keys(f"{prefix}/"))

    @app.get("/v1/runs/{name}/checkpoints/latest", tags=["checkpoints"], dependencies=read)
    def latest(name: str) -> wire.StoredVersion | None:
        with service.sessions() as session:
            return artifacts.latest_checkpoint(session, runs.get_run(session, name))

    @app.put("/v1/runs/{name}/replicas/{replica}", tags=["replicas"], dependencies=run)
    def report(name: str, replica: str, body: wire.ReplicaReport) -> None:
        with service.sessions.begin() as session:
            artifacts.report_replica(session, runs.get_run(session, name), replica, body)


def _reading_routes(app: FastAPI, service: Service) -> None:
    read = _scope(service, "read")

    @app.get("/v1/runs/{name}/steps", tags=["statistics"], dependencies=read)
    def step_views(
        name: str, after: int = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 1000
    ) -> list[wire.StepView]:
        with service.sessions() as session:
            return queries.steps(session, runs.get_run(session, name), after, limit)

    @app.get("/v1/runs/{name}/evaluations", tags=["statistics"], dependencies=read)
    def evaluations(name: str) -> list[wire.Evaluation]:
        with service.sessions() as session:
            return queries.evaluations(session, runs.get_run(session, name))

    @app.get("/v1/runs/{name}/migration", tags=["statistics"], dependencies=read)
    def migration(name: str, before: int, after: int) -> wire.Migration:
        with service.sessions() as session:
            return queries.migration(session, runs.get_run(session, name), before, after)

    @app.get("/v1/runs/{name}/difficulty/bins", tags=["statistics"], dependencies=read)
    def bins(name: str) -> list[int]:
        with service.sessions() as session:
            return queries.difficulty_bins(session, runs.get_run(session, name))

    @app.get("/v1/runs/{name}/difficulty", tags=["statistics"], dependencies=read)
    def difficulty(
        name: str,
        bin: int | None = None,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> wire.DifficultyPage:
        with service.sessions() as session:
            return queries.difficulty(session, runs.get_run(session, name), bin, after, limit)

    @app.get("/v1/runs/{name}/buffers/{buffer}", tags=["statistics"], dependencies=read)
    def buffer(name: str, buffer: wire.Buffer, step: int | None = None) -> list[wire.BufferItem]:
        with service.sessions() as session:
            return queries.buffer_items(session, runs.get_run(session, name), buffer, step)

    @app.get("/v1/runs/{name}/batches/{step}", tags=["statistics"], dependencies=read)
    def batch(name: str, step: int) -> wire.BatchManifest:
        with service.sessions() as session:
            manifest = steps.recorded_batch(session, runs.get_run(session, name), step)
        if manifest is None:
            raise not_found(f"batch of step {step} in run {name!r}")
        return manifest

    @app.get("/v1/runs/{name}/groups/{group_id}", tags=["statistics"], dependencies=read)
    def group(name: str, group_id: int) -> wire.GroupView:
        with service.sessions() as session:
            row, prompt = queries.find_group(session, runs.get_run(session, name), group_id)
        table = read_table(service.store.get(row.object_key, row.object_digest), SCHEMA)
        trajectory = groups_of(table.slice(row.row_start, row.row_count))[0]
        return queries.group_view(row, prompt, trajectory)


async def _in_thread(function: Callable[..., T], *arguments: object) -> T:
    return await run_in_threadpool(function, *arguments)
