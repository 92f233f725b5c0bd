"""What people ask of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from services.buffer import (
    batches,
    buffers,
    committed_steps,
    decisions,
    difficulty,
    evaluations,
    exports,
    prompts,
    runs,
    stored_groups,
)
from services.buffer.api import wire
from services.buffer.api.trajectories import SCHEMA, groups_of, read_table
from services.buffer.routes.common import (
    LARGEST,
    AtStep,
    Cursor,
    Limit,
    Points,
    RunName,
    Step,
    Uid,
)
from services.buffer.service import Service
from services.buffer.tokens import Guard
from services.common.errors import not_found

After = Annotated[int, Query(ge=0, le=LARGEST, description="Only what came after this step")]
AnyStep = Annotated[int, Query(ge=0, le=LARGEST)]
GroupId = Annotated[int, Path(ge=1, le=LARGEST)]

ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"
BINARY = {"schema": {"type": "string", "format": "binary"}}


def statistics_router(service: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1/runs/{name}", dependencies=guard("read"))
    _step_routes(router, service)
    _difficulty_routes(router, service)
    _prompt_routes(router, service)
    _buffer_routes(router, service)
    _batch_routes(router, service)
    _group_routes(router, service)
    return router


def _step_routes(router: APIRouter, service: Service) -> None:
    @router.get("/steps", tags=["steps"])
    def step_views(
        name: RunName, after: After = 0, limit: Limit = 1000, points: Points = None
    ) -> list[wire.StepView]:
        """Committed steps: thresholds, composition, bins, metrics.

        In order from `after` on; with `points`, a sample of all of them, evenly apart.
        """
        with service.sessions() as session:
            run = runs.get_run(session, name)
            if points is not None:
                return committed_steps.sample_steps(session, run, after, points)
            return committed_steps.list_steps(session, run, after, limit)

    @router.get("/evaluations", tags=["evaluations"])
    def list_evaluations(name: RunName) -> list[wire.Evaluation]:
        """Accuracy and bins of every evaluated policy version, on the held-out prompts."""
        with service.sessions() as session:
            return evaluations.list_evaluations(session, runs.get_run(session, name))

    @router.get("/evaluations/migration", tags=["evaluations"])
    def evaluation_migration(name: RunName, before: AnyStep, after: AnyStep) -> wire.Migration:
        """How the held-out prompts moved between bins from one policy version to another."""
        with service.sessions() as session:
            return evaluations.evaluation_migration(
                session, runs.get_run(session, name), before, after
            )


def _difficulty_routes(router: APIRouter, service: Service) -> None:
    @router.get("/difficulty/bins", tags=["difficulty"])
    def bins(name: RunName, step: AtStep = None) -> wire.DifficultyBins:
        """Training prompts by k of G correct at their last attempt, now or as of a step."""
        with service.sessions() as session:
            run = runs.get_run(session, name)
            return difficulty.bins_at(session, run, run.current_step if step is None else step)

    @router.get("/difficulty/bins/history", tags=["difficulty"])
    def bins_history(name: RunName, points: Points = None) -> list[wire.DifficultyBins]:
        """The same over time: at most `points` steps (default 200), evenly apart."""
        with service.sessions() as session:
            return difficulty.bins_history(session, runs.get_run(session, name), points or 200)

    @router.get("/difficulty/migration", tags=["difficulty"])
    def migration(name: RunName, before: AnyStep, after: AnyStep) -> wire.DifficultyMigration:
        """How the training prompts moved between bins from one step to another."""
        with service.sessions() as session:
            return difficulty.migration(session, runs.get_run(session, name), before, after)

    @router.get(
        "/difficulty.parquet",
        tags=["difficulty"],
        response_class=StreamingResponse,
        responses={200: {"content": {PARQUET: BINARY}}},
    )
    def export(name: RunName) -> StreamingResponse:
        """The whole difficulty table of a run, streamed."""
        with service.sessions() as session:
            run = runs.get_run(session, name)
        parts = exports.difficulty_parquet(service.sessions, run)
        return StreamingResponse(parts, media_type=PARQUET)


def _prompt_routes(router: APIRouter, service: Service) -> None:
    @router.get("/prompts", tags=["prompts"])
    def listing(
        name: RunName,
        bin: Annotated[int | None, Query(ge=0, le=254, description="k of G, last time")] = None,
        trend: prompts.Trend | None = None,
        unlocked_after: AtStep = None,
        unlocked_until: AtStep = None,
        search: Annotated[
            str | None, Query(min_length=1, max_length=200, pattern=r"^[^\x00]+$")
        ] = None,
        order: prompts.Order | None = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> wire.Page[wire.DifficultyView]:
        """Attempted training prompts, filtered and ordered.

        `unlocked_after=a&unlocked_until=b`: were at 0 of G, and first solved in steps (a, b].
        `trend=forgotten`: solved once, and at 0 of G now. `search`: part of the uid or payload.
        """
        wanted = prompts.Filter(bin, trend, unlocked_after, unlocked_until, search)
        with service.sessions() as session:
            run = runs.get_run(session, name)
            return prompts.list_prompts(session, run, wanted, order, cursor, limit)

    @router.get("/prompts/history", tags=["prompts"])
    def history(name: RunName, uid: Uid) -> wire.PromptHistory:
        """A prompt: every attempt at it, the batches that used it, its stays in the buffers."""
        with service.sessions() as session:
            return prompts.prompt_history(session, runs.get_run(session, name), uid)

    @router.get("/steps/{step}/decision", tags=["prompts"])
    def decision(name: RunName, step: Step, uid: Uid) -> wire.Decision:
        """Why a prompt is, or is not, in the training batch of this step."""
        with service.sessions() as session:
            return decisions.explain_decision(session, runs.get_run(session, name), step, uid)


def _buffer_routes(router: APIRouter, service: Service) -> None:
    @router.get("/buffers/{buffer}", tags=["buffers"])
    def buffer(
        name: RunName,
        buffer: wire.Buffer,
        step: AtStep = None,
        cursor: Cursor = None,
        limit: Limit = 1000,
    ) -> wire.Page[wire.BufferItem]:
        """What a buffer holds, now or as of a step, with age and staleness."""
        with service.sessions() as session:
            run = runs.get_run(session, name)
            return buffers.list_entries(session, run, buffer, step, cursor, limit)

    @router.get("/buffers/{buffer}/events", tags=["buffers"])
    def events(
        name: RunName,
        buffer: wire.Buffer,
        after: After = 0,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> wire.Page[wire.BufferEvent]:
        """Admissions and evictions in order, each with its reason."""
        with service.sessions() as session:
            run = runs.get_run(session, name)
            return buffers.list_events(session, run, buffer, after, cursor, limit)


def _batch_routes(router: APIRouter, service: Service) -> None:
    def manifest_of(name: str, step: int) -> wire.BatchManifest:
        with service.sessions() as session:
            manifest = batches.recorded_batch(session, runs.get_run(session, name), step)
        if manifest is None:
            raise not_found(f"batch of step {step} in run {name!r}")
        return manifest

    @router.get("/batches", tags=["batches"])
    def list_batches(
        name: RunName, cursor: Cursor = None, limit: Limit = 100
    ) -> wire.Page[wire.BatchSummary]:
        """The composition of every batch, by step."""
        with service.sessions() as session:
            return batches.list_batches(session, runs.get_run(session, name), cursor, limit)

    @router.get("/batches/{step}", tags=["batches"])
    def batch(name: RunName, step: Step) -> wire.BatchManifest:
        """The members of a batch: groups, sources, where their trajectories are."""
        return manifest_of(name, step)

    @router.get(
        "/batches/{step}/arrow",
        tags=["batches"],
        response_class=StreamingResponse,
        responses={200: {"content": {ARROW: BINARY}}},
    )
    def batch_arrow(name: RunName, step: Step) -> StreamingResponse:
        """All trajectories of a batch as one Arrow stream, group by group."""
        members = manifest_of(name, step).members
        return StreamingResponse(exports.arrow_of(service.store, members), media_type=ARROW)


def _group_routes(router: APIRouter, service: Service) -> None:
    @router.get("/groups/{group_id}", tags=["groups"])
    def group(name: RunName, group_id: GroupId) -> wire.GroupView:
        """A group's responses: text, tokens, log-probs, rewards."""
        with service.sessions() as session:
            row, prompt = stored_groups.find_group(session, runs.get_run(session, name), group_id)
        table = read_table(service.store.get(row.object_key, row.object_digest), SCHEMA)
        trajectory = groups_of(table.slice(row.row_start, row.row_count))[0]
        return stored_groups.group_view(row, prompt, trajectory)

    @router.get(
        "/groups/{group_id}/arrow",
        tags=["groups"],
        response_class=StreamingResponse,
        responses={200: {"content": {ARROW: BINARY}}},
    )
    def group_arrow(name: RunName, group_id: GroupId) -> StreamingResponse:
        """The same as an Arrow stream."""
        with service.sessions() as session:
            member = stored_groups.locate_group(session, runs.get_run(session, name), group_id)
        if member is None:
            raise not_found(f"group {group_id} in run {name!r}")
        return StreamingResponse(exports.arrow_of(service.store, [member]), media_type=ARROW)
