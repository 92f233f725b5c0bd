"""Datasets, and runs from their creation to their deletion."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from services.buffer import comparisons, lifecycle, runs
from services.buffer.api import wire
from services.buffer.routes.common import Attempt, Cursor, Limit, RunName
from services.buffer.service import Service
from services.buffer.tokens import Guard

DatasetName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


def runs_router(service: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _dataset_routes(router, service, guard)
    _run_routes(router, service, guard)
    _lifecycle_routes(router, service, guard)
    return router


def _dataset_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.post("/datasets/{dataset}", tags=["datasets"], dependencies=run)
    def upload(dataset: DatasetName, upload: wire.DatasetUpload) -> wire.DatasetState:
        """Stores prompts, in order. What is there stays; a dataset that a run uses never grows."""
        with service.sessions.begin() as session:
            return runs.upload_prompts(session, dataset, upload)

    @router.get("/datasets/{dataset}", tags=["datasets"], dependencies=read)
    def dataset_state(dataset: DatasetName) -> wire.DatasetState:
        with service.sessions() as session:
            return wire.DatasetState(dataset=dataset, prompts=runs.dataset_size(session, dataset))


def _run_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run, read = guard("run"), guard("read")

    @router.post("/runs", tags=["runs"], dependencies=run)
    def create(request: wire.RunCreate) -> wire.RunState:
        """Creates a run; the one there is if it was created the same way, 409 if another way."""
        with service.changing(request.name) as session:
            return runs.run_state(runs.create_run(session, request))

    @router.get("/runs", tags=["runs"], dependencies=read)
    def list_runs(
        status: wire.Status | None = None,
        search: Annotated[str | None, Query(max_length=63, description="Part of the name")] = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> wire.Page[wire.RunState]:
        """Runs, the newest first."""
        with service.sessions() as session:
            return runs.list_runs(session, status, search, cursor, limit)

    @router.get("/runs/{name}", tags=["runs"], dependencies=read)
    def show(name: RunName) -> wire.RunState:
        with service.sessions() as session:
            return runs.run_state(runs.get_run(session, name))

    @router.get("/comparisons", tags=["runs"], dependencies=read)
    def compare(
        first: Annotated[str, Query(pattern=wire.RUN_NAME)],
        second: Annotated[str, Query(pattern=wire.RUN_NAME)],
    ) -> wire.RunComparison:
        """Two runs side by side: configuration, difficulty, evaluations."""
        with service.sessions() as session:
            pair = [runs.get_run(session, name) for name in (first, second)]
            return comparisons.compare_runs(session, pair[0], pair[1])


def _lifecycle_routes(router: APIRouter, service: Service, guard: Guard) -> None:
    run = guard("run")

    @router.delete("/runs/{name}", tags=["runs"], dependencies=run, status_code=204)
    def delete(name: RunName) -> None:
        """Deletes a run that is not at work: its rows and its objects. There is no way back."""
        lifecycle.delete_run(service, name)

    @router.patch("/runs/{name}", tags=["runs"], dependencies=run)
    def patch(name: RunName, change: wire.RunPatch, attempt: Attempt) -> wire.RunState:
        """How a run ended, as its own processes say."""
        with service.changing(name) as session:
            return runs.run_state(lifecycle.end_run(session, name, attempt, change.status))

    @router.post("/runs/{name}/attempts", tags=["runs"], dependencies=run)
    def begin_attempt(name: RunName) -> wire.RunState:
        """Supersedes every process that works on the run; rewinds to the last checkpoint."""
        with service.changing(name) as session:
            return runs.run_state(lifecycle.begin_attempt(session, name))

    @router.post("/runs/{name}/pause", tags=["runs"], dependencies=run)
    def pause(name: RunName) -> wire.RunState:
        """No new prompts and batches until it is resumed; its processes wait."""
        with service.changing(name) as session:
            return runs.run_state(lifecycle.pause(session, name))

    @router.post("/runs/{name}/resume", tags=["runs"], dependencies=run)
    def resume(name: RunName) -> wire.RunState:
        """Ends a pause."""
        with service.changing(name) as session:
            return runs.run_state(lifecycle.resume(session, name))

    @router.post("/runs/{name}/stop", tags=["runs"], dependencies=run)
    def stop(name: RunName) -> wire.RunState:
        """Turns the run's processes away, for good. A new attempt resumes from the checkpoint."""
        with service.changing(name) as session:
            return runs.run_state(lifecycle.stop(session, name))
