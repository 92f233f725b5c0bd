"""The step protocol: prompts, groups, batch, commit and rewind."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from prometheus_client import Counter
from starlette.concurrency import run_in_threadpool

from services.buffer.api import wire
from services.buffer.routes.common import Attempt, EvaluationSet, RunName, Step, Wait
from services.buffer.runs import runs
from services.buffer.runs.tokens import permit
from services.buffer.service import Service, ServiceDep
from services.buffer.steps import batches, commits, ingest, step_prompts
from services.common.guard import GuardedRoute

GROUPS = Counter("bapo_groups_accepted", "Groups accepted", ["run", "kind"])

LARGEST_ARROW = 512 << 20
"""Largest body in bytes. A step of 256 groups x 8 responses x 4,096 tokens is some 80 MiB."""
ARROW_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/vnd.apache.arrow.stream": {
                "schema": {"type": "string", "format": "binary"}
            }
        },
    }
}

COLLECTOR, TRAINER = permit("collector"), permit("trainer")

router = APIRouter(route_class=GuardedRoute, prefix="/v1/runs/{name}", tags=["steps"])


def _read_rollouts(
    step: Step, kind: wire.Kind = "fresh", evaluation_set: EvaluationSet = None
) -> wire.Rollouts:
    return wire.Rollouts(step, kind, evaluation_set)


Rollouts = Annotated[wire.Rollouts, Depends(_read_rollouts)]


@router.post("/steps/{step}/prompts", dependencies=COLLECTOR)
async def select_prompts(
    service: ServiceDep,
    name: RunName,
    rollouts: Rollouts,
    attempt: Attempt,
    generation_round: Annotated[int, Query(ge=0, le=1000)] = 0,
    wait: Wait = 0,
) -> wire.StepPrompts:
    """Returns the prompts to roll out at this step.

    Makes their policy version the target that rollout replicas load, unless all their groups are
    recorded already.
    """

    def read() -> tuple[wire.StepPrompts, int]:
        with service.sessions.begin() as session:
            run = runs.get_run(session, name)
            runs.check_attempt(run, attempt)
            prompts = step_prompts.select_prompts(run, rollouts, generation_round)
            return prompts, run.target_version

    prompts, target = await service.wait_until(name, wait, read, lambda result: result[0].ready)
    if prompts.prompts and not prompts.complete and target != prompts.policy_version:
        version = prompts.policy_version
        await run_in_threadpool(_set_target_version, service, name, attempt, version)
    return prompts


def _set_target_version(service: Service, name: str, attempt: int, version: int) -> None:
    """Sets the policy version that rollout replicas should serve."""
    with service.write_transaction(name) as session:
        runs.lock_run(session, name, attempt).target_version = version


@router.post(
    "/steps/{step}/groups",
    dependencies=permit("collector", largest_body=LARGEST_ARROW),
    openapi_extra=ARROW_BODY,
)
async def post_groups(
    service: ServiceDep,
    request: Request,
    name: RunName,
    rollouts: Rollouts,
    attempt: Attempt,
    weights: Annotated[
        wire.Digest | None,
        Query(description="Manifest digest of the weights that made the groups"),
    ] = None,
) -> wire.GroupsAccepted:
    """Records whole groups, sent as an Arrow IPC stream; each once, however often it is sent."""
    body = await request.body()
    result = await run_in_threadpool(
        ingest.accept_groups, service, name, rollouts, attempt, body, weights
    )
    GROUPS.labels(name, rollouts.kind).inc(result.accepted)
    return result


@router.post("/steps/{step}/batch", dependencies=TRAINER)
async def build_batch(
    service: ServiceDep, name: RunName, step: Step, attempt: Attempt, wait: Wait = 0
) -> wire.BatchManifest:
    """Returns the training batch (X1, X2 and X3), built once all groups of the step are recorded.

    The batch is built once; repeating the call returns the same one.
    """

    def build() -> wire.BatchManifest:
        with service.sessions.begin() as session:
            return batches.build_step_batch(runs.lock_run(session, name, attempt), step)

    return await service.wait_until(name, wait, build, lambda manifest: manifest.ready)


@router.post(
    "/steps/{step}/proximal",
    dependencies=permit("trainer", largest_body=LARGEST_ARROW),
    openapi_extra=ARROW_BODY,
)
async def post_proximal(
    service: ServiceDep, request: Request, name: RunName, step: Step, attempt: Attempt
) -> None:
    """Records the trainer's log-probs at this step of groups that may be replayed (Arrow)."""
    body = await request.body()
    await run_in_threadpool(ingest.accept_proximal, service, name, step, attempt, body)


@router.post("/steps/{step}/commit", dependencies=TRAINER)
def commit_step(
    service: ServiceDep, name: RunName, step: Step, attempt: Attempt, body: wire.Commit
) -> wire.RunState:
    """Commits the step: updates difficulty and buffers, and makes it the run's current step.

    Committing it again changes nothing.
    """
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        commits.commit_step(run, step, body)
        return runs.run_state(run)


@router.post("/rewind", dependencies=permit("admin"))
def rewind(
    service: ServiceDep, name: RunName, attempt: Attempt, body: wire.Rewind
) -> wire.RunState:
    """Restores the state after the commit of a step, and drops everything later."""
    with service.write_transaction(name) as session:
        run = runs.lock_run(session, name, attempt)
        commits.rewind_run(run, body.step)
        return runs.run_state(run)
