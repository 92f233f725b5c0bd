"""The step protocol (docs/concepts.md), for the processes of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from prometheus_client import Counter, Gauge
from starlette.concurrency import run_in_threadpool

from services.buffer import batches, commits, ingest, runs, step_prompts
from services.buffer.api import wire
from services.buffer.routes.common import Attempt, RunName, Step, Wait
from services.buffer.service import Service
from services.buffer.tokens import Guard

GROUPS = Counter("bapo_groups_accepted", "Groups accepted", ["run", "kind"])
COMMITS = Gauge("bapo_current_step", "Last committed step", ["run"])

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


def steps_router(service: Service, guard: Guard) -> APIRouter:
    router = APIRouter(prefix="/v1/runs/{name}", tags=["steps"], dependencies=guard("run"))

    @router.post("/steps/{step}/prompts")
    async def prompts(
        name: RunName,
        step: Step,
        attempt: Attempt,
        kind: wire.Kind = "fresh",
        generation_round: Annotated[int, Query(ge=0, le=1000)] = 0,
        wait: Wait = 0,
    ) -> wire.StepPrompts:
        """The prompts to roll out at this step."""

        def look() -> tuple[wire.StepPrompts, int]:
            with service.sessions.begin() as session:
                row = runs.get_run(session, name)
                runs.check_attempt(row, attempt)
                answer = step_prompts.select_prompts(session, row, step, kind, generation_round)
                return answer, row.target_version

        answer, wanted = await service.until(name, wait, look, lambda found: found[0].ready)
        if answer.prompts and not answer.complete and wanted != answer.policy_version:
            await run_in_threadpool(_want, service, name, attempt, answer.policy_version)
        return answer

    @router.post("/steps/{step}/groups", openapi_extra=ARROW_BODY)
    async def groups(
        request: Request, name: RunName, step: Step, attempt: Attempt, kind: wire.Kind = "fresh"
    ) -> wire.GroupsAccepted:
        """Whole groups as an Arrow IPC stream. A group lands once, however often it is sent."""
        body = await request.body()
        accepted = await run_in_threadpool(
            ingest.accept_groups, service, name, step, attempt, kind, body
        )
        GROUPS.labels(name, kind).inc(accepted.accepted)
        return accepted

    @router.post("/steps/{step}/batch")
    async def batch(
        name: RunName, step: Step, attempt: Attempt, wait: Wait = 0
    ) -> wire.BatchManifest:
        """The training batch, built once all groups of the step have landed."""

        def build() -> wire.BatchManifest:
            with service.sessions.begin() as session:
                return batches.build_step_batch(
                    session, runs.lock_run(session, name, attempt), step
                )

        return await service.until(name, wait, build, lambda manifest: manifest.ready)

    @router.post("/steps/{step}/proximal", openapi_extra=ARROW_BODY)
    async def proximal(request: Request, name: RunName, step: Step, attempt: Attempt) -> None:
        """Log-probs of the trainer at this step for groups that may be replayed (Arrow)."""
        body = await request.body()
        await run_in_threadpool(ingest.accept_proximal, service, name, step, attempt, body)

    @router.post("/steps/{step}/commit")
    def commit(name: RunName, step: Step, attempt: Attempt, body: wire.Commit) -> wire.RunState:
        """Closes the step, once."""
        with service.changing(name) as session:
            row = runs.lock_run(session, name, attempt)
            commits.commit_step(session, row, step, body.metrics)
            COMMITS.labels(name).set(row.current_step)
            return runs.run_state(row)

    @router.post("/rewind")
    def rewind(name: RunName, attempt: Attempt, body: wire.Rewind) -> wire.RunState:
        """Undoes everything after a step, exactly."""
        with service.changing(name) as session:
            row = runs.lock_run(session, name, attempt)
            commits.rewind_run(session, row, body.step)
            return runs.run_state(row)

    return router


def _want(service: Service, name: str, attempt: int, version: int) -> None:
    """Rollouts by `version` are about to be asked for."""
    with service.changing(name) as session:
        runs.lock_run(session, name, attempt).target_version = version
