"""Runs, from their creation to their deletion."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from services.buffer.api import wire
from services.buffer.queries import comparisons
from services.buffer.routes.common import LARGEST_CONFIG, Attempt, Cursor, Limit, RunName
from services.buffer.runs import forks, lifecycle, runs
from services.buffer.runs.tokens import AcceptedToken, permit
from services.buffer.service import ServiceDep
from services.common.guard import GuardedRoute
from services.common.problems import Problem

READ, RUN = permit("read"), permit("run")
END = permit("run", "pipeline")
CREATE = permit("run", "pipeline", largest_body=LARGEST_CONFIG)

router = APIRouter(route_class=GuardedRoute, prefix="/v1")


# ---- runs ---------------------------------------------------------------------------------------


@router.post("/runs", tags=["runs"], dependencies=CREATE)
def create_run(service: ServiceDep, request: wire.RunCreate) -> wire.RunState:
    """Creates a run. Returns the existing one if it is the same, and 409 if it differs."""
    with service.write_transaction(request.name) as session:
        return runs.run_state(runs.create_run(session, request))


@router.get(
    "/runs",
    tags=["runs"],
    dependencies=permit("read", "replica", "collector", of_no_run=True),
)
def list_runs(
    service: ServiceDep,
    request: Request,
    status: wire.Status | None = None,
    search: Annotated[str | None, Query(max_length=63, description="Part of the name")] = None,
    parent: Annotated[
        str | None, Query(max_length=63, description="Run whose forks alone are listed")
    ] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> wire.Page[wire.RunState]:
    """Lists runs, newest first, filtered by status, by part of the name and by parent.

    A token that is for one run finds no other.
    """
    token: AcceptedToken = request.state.token
    with service.sessions() as session:
        return runs.list_runs(session, status, search, cursor, limit, token.run, parent)


@router.get(
    "/runs/{name}",
    tags=["runs"],
    dependencies=permit("read", "replica", "collector", "trainer"),
)
def get_run(service: ServiceDep, name: RunName) -> wire.RunState:
    """Returns a run: its configuration, its status and its last committed step."""
    with service.sessions() as session:
        return runs.run_state(runs.get_run(session, name))


@router.post("/runs/{name}/forks", tags=["runs"], dependencies=CREATE)
def fork_run(
    service: ServiceDep, name: RunName, request: Request, fork: wire.ForkRequest
) -> wire.RunState:
    """Makes a new run whose past is this run's up to a step, with other values from there on.

    Groups, batches, weights and checkpoints of the past are shared, not copied. Returns the fork
    that exists if it is the same. 409 for a step after the last checkpoint, which may be trained
    again, and for weights that are not stored any more; 422 for keys that the past depends on.
    """
    token: AcceptedToken = request.state.token
    if token.run not in (None, fork.name):
        raise Problem(403, "Forbidden", f"this token is for run {token.run!r} alone")
    by = f"token {token.name!r}"
    with service.write_transaction(name) as session:
        return runs.run_state(forks.fork_run(session, name, fork, by=by))


@router.get("/comparisons", tags=["runs"], dependencies=READ)
def compare_runs(
    service: ServiceDep,
    run: Annotated[
        list[Annotated[str, Field(pattern=wire.RUN_NAME)]],
        Query(
            min_length=1,
            max_length=wire.MAX_COMPARED,
            description="Name of a run; repeat it for each of the runs",
        ),
    ],
    points: Annotated[
        int, Query(ge=1, le=2000, description="Largest number of steps of a curve, evenly spaced")
    ] = 300,
) -> wire.RunComparison:
    """Compares runs: curves, the measure at equal costs, configuration and difficulty."""
    with service.sessions() as session:
        found = [runs.get_run(session, name) for name in dict.fromkeys(run)]
        return comparisons.compare_runs(found, points)


# ---- lifecycle ----------------------------------------------------------------------------------


@router.delete("/runs/{name}", tags=["runs"], dependencies=RUN, status_code=204)
def delete_run(service: ServiceDep, name: RunName) -> None:
    """Deletes a run with its rows and objects, irrevocably; 409 while it is running or paused."""
    lifecycle.delete_run(service, name)


@router.patch("/runs/{name}", tags=["runs"], dependencies=permit("run", "collector", "pipeline"))
def end_run(
    service: ServiceDep, name: RunName, change: wire.RunPatch, attempt: Attempt
) -> wire.RunState:
    """Records how a run ended, as its own processes report it."""
    with service.write_transaction(name) as session:
        return runs.run_state(lifecycle.end_run(session, name, attempt, change))


@router.post("/runs/{name}/attempts", tags=["runs"], dependencies=permit("run", "trainer"))
def begin_attempt(service: ServiceDep, name: RunName, reopen: bool = False) -> wire.RunState:
    """Begins a new attempt: supersedes earlier ones, and rewinds to the last checkpoint.

    With `reopen`, a run that was stopped or has failed is continued, and a pause ends.
    """
    with service.write_transaction(name) as session:
        return runs.run_state(lifecycle.begin_attempt(session, name, reopen=reopen))


@router.post("/runs/{name}/changes", tags=["runs"], dependencies=END)
def change_config(
    service: ServiceDep, name: RunName, request: Request, change: wire.ChangeRequest
) -> wire.RunState:
    """Changes keys of the configuration, from the step after the last checkpoint on.

    It supersedes the processes of the run and rewinds it to that checkpoint. A run that is finished
    and gets more steps is stopped afterwards; a new attempt continues it. 422 for keys that may not
    change, which `detail` lists, and 409 for a run that another workflow trains.
    """
    by = change.by or f"token {request.state.token.name!r}"
    with service.write_transaction(name) as session:
        changed = lifecycle.change_config(session, name, change.values, by=by, claim=change)
        return runs.run_state(changed)


@router.post("/runs/{name}/turn", tags=["runs"], dependencies=END)
def take_turn(service: ServiceDep, name: RunName, request: wire.TurnRequest) -> wire.Turn:
    """Starts a run if no other run is in front of it, and queues it otherwise.

    A pipeline repeats this call until the turn is granted; a queued run that stops asking loses its
    place after a minute. 409 for a run that another workflow trains.
    """
    with service.write_transaction(name) as session:
        in_front = lifecycle.take_turn(session, name, request)
        if in_front is None:
            return wire.Turn(granted=True)
        return wire.Turn(
            granted=False,
            in_front=in_front.name,
            current_step=in_front.current_step,
            steps=in_front.values["steps"],
        )


@router.post("/runs/{name}/pause", tags=["runs"], dependencies=RUN)
def pause_run(service: ServiceDep, name: RunName) -> wire.RunState:
    """Pauses a run: it gets no new prompts and batches until it is resumed."""
    with service.write_transaction(name) as session:
        return runs.run_state(lifecycle.pause(session, name))


@router.post("/runs/{name}/resume", tags=["runs"], dependencies=RUN)
def resume_run(service: ServiceDep, name: RunName) -> wire.RunState:
    """Resumes a paused run."""
    with service.write_transaction(name) as session:
        return runs.run_state(lifecycle.resume(session, name))


@router.post("/runs/{name}/stop", tags=["runs"], dependencies=END)
def stop_run(
    service: ServiceDep, name: RunName, request: Request, stop: wire.StopRequest | None = None
) -> wire.RunState:
    """Stops a run: further calls of its processes get 409, which says who stopped it and why.

    A new attempt continues it from the last checkpoint.
    """
    stop = stop or wire.StopRequest()
    by = stop.by or f"token {request.state.token.name!r}"
    with service.write_transaction(name) as session:
        return runs.run_state(
            lifecycle.stop(session, name, by=by, reason=stop.reason, workflow=stop.workflow)
        )
