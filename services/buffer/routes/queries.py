"""Views of a run: steps, evaluations, difficulty, prompts, buffers, batches and groups."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from services.buffer.api import wire
from services.buffer.api.trajectories import groups_of, read_trajectories
from services.buffer.queries import (
    committed_steps,
    decisions,
    difficulty,
    evaluations,
    exports,
    progress,
    prompts,
    responses,
)
from services.buffer.routes.common import (
    LARGEST,
    AsOfStep,
    Cursor,
    EvaluationSet,
    Limit,
    Points,
    RunName,
    Step,
    Uid,
)
from services.buffer.runs import runs
from services.buffer.runs.tokens import permit
from services.buffer.service import Service, ServiceDep
from services.buffer.steps import batches, buffers
from services.buffer.storage import artifacts, stored_groups
from services.common.guard import GuardedRoute
from services.common.problems import not_found

After = Annotated[int, Query(ge=0, le=LARGEST, description="Only what came after this step")]
AnyStep = Annotated[int, Query(ge=0, le=LARGEST)]
GroupId = Annotated[int, Path(ge=1, le=LARGEST)]

ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"
BINARY = {"schema": {"type": "string", "format": "binary"}}

router = APIRouter(route_class=GuardedRoute, prefix="/v1/runs/{name}", dependencies=permit("read"))


# ---- steps and evaluations ----------------------------------------------------------------------


@router.get("/steps", tags=["steps"], dependencies=permit("read", "trainer"))
def list_steps(
    service: ServiceDep, name: RunName, after: After = 0, limit: Limit = 1000, points: Points = None
) -> list[wire.StepView]:
    """Lists committed steps: replay window, composition of the batch, bins, metrics.

    Steps come in order from `after` on; with `points`, an evenly spaced sample of all of them.
    """
    with service.sessions() as session:
        run = runs.get_run(session, name)
        if points is not None:
            return committed_steps.sample_steps(run, after, points)
        return committed_steps.list_steps(run, after, limit)


@router.get("/progress", tags=["steps"])
def read_progress(service: ServiceDep, name: RunName) -> wire.RunProgress:
    """Returns what a run works at: the groups that it waits for, or its training batch."""
    with service.sessions() as session:
        return progress.read_progress(runs.get_run(session, name))


@router.get("/evaluations", tags=["evaluations"])
def list_evaluations(
    service: ServiceDep, name: RunName, evaluation_set: EvaluationSet = None
) -> list[wire.Evaluation]:
    """Lists the scores and the bins of every evaluated policy version on one evaluation set."""
    with service.sessions() as session:
        return evaluations.list_evaluations(runs.get_run(session, name), evaluation_set)


@router.get("/evaluation-sets", tags=["evaluations"], dependencies=permit("read", "collector"))
def list_evaluation_sets(service: ServiceDep, name: RunName) -> list[wire.EvaluationSetView]:
    """Lists the evaluation sets of a run, with the evaluations of all policy versions on each."""
    with service.sessions() as session:
        return evaluations.list_sets(runs.get_run(session, name))


@router.get("/evaluations/migration", tags=["evaluations"])
def evaluation_migration(
    service: ServiceDep,
    name: RunName,
    before: AnyStep,
    after: AnyStep,
    evaluation_set: EvaluationSet = None,
) -> wire.Migration:
    """Counts how the prompts of an evaluation set moved between bins from one policy version to
    another."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
        return evaluations.evaluation_migration(run, before, after, evaluation_set)


# ---- difficulty ---------------------------------------------------------------------------------


@router.get("/difficulty/bins", tags=["difficulty"])
def difficulty_bins(
    service: ServiceDep, name: RunName, step: AsOfStep = None
) -> wire.DifficultyBins:
    """Counts training prompts by k of G correct in their last group, as of a step."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
        return difficulty.bins_at(run, run.current_step if step is None else step)


@router.get("/difficulty/bins/history", tags=["difficulty"])
def difficulty_bins_history(
    service: ServiceDep, name: RunName, points: Points = None
) -> list[wire.DifficultyBins]:
    """Counts training prompts by bin at evenly spaced steps, by default at 200 of them."""
    with service.sessions() as session:
        return difficulty.bins_history(runs.get_run(session, name), points or 200)


@router.get("/difficulty/migration", tags=["difficulty"])
def difficulty_migration(
    service: ServiceDep, name: RunName, before: AnyStep, after: AnyStep
) -> wire.DifficultyMigration:
    """Counts how training prompts moved between bins from one step to another."""
    with service.sessions() as session:
        return difficulty.migration(runs.get_run(session, name), before, after)


@router.get(
    "/difficulty.parquet",
    tags=["difficulty"],
    response_class=StreamingResponse,
    responses={200: {"content": {PARQUET: BINARY}}},
)
def export_difficulty(service: ServiceDep, name: RunName) -> StreamingResponse:
    """Streams the whole difficulty table of a run as Parquet."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
    chunks = exports.difficulty_parquet(service.sessions, run)
    return StreamingResponse(chunks, media_type=PARQUET)


# ---- prompts ------------------------------------------------------------------------------------


@router.get("/prompts", tags=["prompts"])
def list_prompts(
    service: ServiceDep,
    name: RunName,
    bin: Annotated[
        int | None, Query(ge=0, le=254, description="k of G correct in the last group")
    ] = None,
    trend: wire.Trend | None = None,
    unlocked_after: Annotated[
        int | None,
        Query(
            ge=0,
            le=LARGEST,
            description="Only prompts that began at 0 of G and were first solved after this step",
        ),
    ] = None,
    unlocked_until: Annotated[
        int | None,
        Query(
            ge=0,
            le=LARGEST,
            description="Only prompts that began at 0 of G and were solved by this step",
        ),
    ] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=200, pattern=r"^[^\x00]+$")
    ] = None,
    order: wire.Order | None = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> wire.Page[wire.DifficultyView]:
    """Lists attempted training prompts, filtered and ordered.

    `unlocked_after=a&unlocked_until=b`: first at 0 of G, and first solved in steps (a, b].
    `trend=forgotten`: solved once, and at 0 of G now. `search`: part of the uid or payload.
    """
    filter_ = prompts.Filter(bin, trend, unlocked_after, unlocked_until, search)
    with service.sessions() as session:
        run = runs.get_run(session, name)
        return prompts.list_prompts(run, filter_, order, cursor, limit)


@router.get("/prompts/history", tags=["prompts"])
def prompt_history(service: ServiceDep, name: RunName, uid: Uid) -> wire.PromptHistory:
    """Returns a prompt's groups, the batches that used them, and their time in the buffers."""
    with service.sessions() as session:
        return prompts.prompt_history(runs.get_run(session, name), uid)


@router.get("/steps/{step}/decision", tags=["prompts"])
def explain_decision(service: ServiceDep, name: RunName, step: Step, uid: Uid) -> wire.Decision:
    """Explains why a prompt is, or is not, in the training batch of this step."""
    with service.sessions() as session:
        return decisions.explain_decision(runs.get_run(session, name), step, uid)


# ---- buffers ------------------------------------------------------------------------------------


@router.get("/buffers", tags=["buffers"])
def summarise_buffers(
    service: ServiceDep, name: RunName, step: AsOfStep = None
) -> list[wire.BufferSummary]:
    """Returns how many groups each buffer holds as of a step, with their ages and staleness."""
    with service.sessions() as session:
        return buffers.summarise_buffers(runs.get_run(session, name), step)


@router.get("/buffers/{buffer}", tags=["buffers"])
def list_buffer(
    service: ServiceDep,
    name: RunName,
    buffer: wire.BufferName,
    step: AsOfStep = None,
    cursor: Cursor = None,
    limit: Limit = 1000,
) -> wire.Page[wire.BufferItem]:
    """Lists the entries of a buffer as of a step, with their age and staleness."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
        return buffers.list_entries(run, buffer, step, cursor, limit)


@router.get("/buffers/{buffer}/events", tags=["buffers"])
def list_buffer_events(
    service: ServiceDep,
    name: RunName,
    buffer: wire.BufferName,
    after: After = 0,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> wire.Page[wire.BufferEvent]:
    """Lists admissions to a buffer and evictions from it in order, each with its reason."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
        return buffers.list_events(run, buffer, after, cursor, limit)


# ---- batches and groups -------------------------------------------------------------------------


@router.get("/batches", tags=["batches"])
def list_batches(
    service: ServiceDep, name: RunName, after: After = 0, cursor: Cursor = None, limit: Limit = 100
) -> wire.Page[wire.BatchSummary]:
    """Lists the composition of every batch after a step, by step."""
    with service.sessions() as session:
        return batches.list_batches(runs.get_run(session, name), after, cursor, limit)


@router.get("/batches/{step}", tags=["batches"])
def get_batch(service: ServiceDep, name: RunName, step: Step) -> wire.BatchManifest:
    """Returns the members of a batch: groups, sources, and where their trajectories are."""
    return _manifest(service, name, step)


@router.get(
    "/batches/{step}/arrow",
    tags=["batches"],
    response_class=StreamingResponse,
    responses={200: {"content": {ARROW: BINARY}}},
)
def export_batch(service: ServiceDep, name: RunName, step: Step) -> StreamingResponse:
    """Streams all trajectories of a batch as Arrow IPC, group by group."""
    members = _manifest(service, name, step).members
    return StreamingResponse(exports.arrow_of(service.store, members), media_type=ARROW)


def _manifest(service: Service, name: str, step: int) -> wire.BatchManifest:
    with service.sessions() as session:
        manifest = batches.recorded_batch(runs.get_run(session, name), step)
    if manifest is None:
        raise not_found(f"batch of step {step} in run {name!r}")
    return manifest


@router.get(
    "/groups.arrow",
    tags=["groups"],
    response_class=StreamingResponse,
    responses={200: {"content": {ARROW: BINARY}}},
)
def export_groups(
    service: ServiceDep,
    name: RunName,
    first: Annotated[int, Query(ge=1, le=LARGEST, description="First step")],
    last: Annotated[int, Query(ge=1, le=LARGEST, description="Last step")],
) -> StreamingResponse:
    """Streams summaries of the training groups of some steps as Arrow IPC."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
    chunks = exports.groups_arrow(service.sessions, run, first, last)
    return StreamingResponse(chunks, media_type=ARROW)


@router.get("/responses", tags=["groups"])
def list_responses(
    service: ServiceDep,
    name: RunName,
    evaluation_set: Annotated[
        str | None,
        Query(max_length=32, description="Name of an evaluation set; default: training prompts"),
    ] = None,
    first: Annotated[
        int | None,
        Query(
            ge=1,
            le=LARGEST,
            description="First step, or policy version of an evaluation; default: `last`",
        ),
    ] = None,
    last: Annotated[
        int | None,
        Query(
            ge=1,
            le=LARGEST,
            description="Last step, or policy version of an evaluation; default: the newest",
        ),
    ] = None,
    correct: Annotated[
        bool | None, Query(description="Only correct responses, or only wrong ones")
    ] = None,
    contains: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=200,
            pattern=r"^[^\x00]+$",
            description="Part of the text, in any case",
        ),
    ] = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> wire.Page[wire.ListedResponse]:
    """Lists what the model wrote, with verdicts, in a range of steps or of evaluations.

    Reads the trajectories of at most 256 groups: a page may hold fewer responses than `limit`, or
    none, although `next` says that a page follows.
    """
    filter_ = responses.Filter(evaluation_set, first, last, correct, contains)
    return responses.list_responses(service, name, filter_, cursor, limit)


@router.get("/groups/{group_id}", tags=["groups"])
def get_group(
    service: ServiceDep,
    name: RunName,
    group_id: GroupId,
    tokens: Annotated[bool, Query(description="Also the text of each token")] = False,
) -> wire.GroupView:
    """Returns the responses of a group: text, tokens, log-probs and rewards."""
    with service.sessions() as session:
        run = runs.get_run(session, name)
        group, prompt = stored_groups.find_group(run, group_id)
        weights = artifacts.get_weights(run, 1) if tokens else None
    table = read_trajectories(service.store.get(group.object_key, group.object_digest))
    trajectory = groups_of(table.slice(group.row_start, group.row_count))[0]
    texts = None if weights is None else service.vocabularies.read(weights)
    return stored_groups.group_view(group, prompt, trajectory, texts)


@router.get(
    "/groups/{group_id}/arrow",
    tags=["groups"],
    response_class=StreamingResponse,
    responses={200: {"content": {ARROW: BINARY}}},
)
def export_group(service: ServiceDep, name: RunName, group_id: GroupId) -> StreamingResponse:
    """Streams the trajectories of a group as Arrow IPC."""
    with service.sessions() as session:
        member = stored_groups.locate_group(runs.get_run(session, name), group_id)
    if member is None:
        raise not_found(f"group {group_id} in run {name!r}")
    return StreamingResponse(exports.arrow_of(service.store, [member]), media_type=ARROW)
