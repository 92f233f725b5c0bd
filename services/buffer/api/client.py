"""The typed client of the buffer service: the one way that other parts reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from pydantic import TypeAdapter

from services.buffer.api import wire
from services.common.errors import ServiceError
from services.common.http import GIVE_UP_AFTER_S, HttpClient

Answer = TypeVar("Answer")
Answered = TypeVar("Answered")
Parameters = ParamSpec("Parameters")

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
LONG_POLL_S = 10.0
UPLOAD_CHUNK = 5_000


class BufferClient:
    """Calls of one process on behalf of a run's attempt; all of them may be repeated."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        run: str = "",
        attempt: int = 0,
        give_up_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        """Asks a service that does not answer again for `give_up_s` seconds."""
        self.run, self.attempt = run, attempt
        self._http = HttpClient("buffer service", url, token, give_up_s=give_up_s)

    def close(self) -> None:
        self._http.close()

    def _ask(self, model: type[Answer], method: str, path: str, **arguments: Any) -> Answer:
        content = self._send(method, path, **arguments).content
        return TypeAdapter(model).validate_json(content)

    def _read(self, model: type[Answer], path: str, **params: Any) -> Answer:
        given = {name: value for name, value in params.items() if value is not None}
        return self._ask(model, "GET", f"/v1/runs/{self.run}/{path}", params=given)

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"X-Bapo-Attempt": str(self.attempt), **arguments.pop("headers", {})}
        return self._http.call(method, path, headers=headers, **arguments)

    def _step(self, step: int, what: str) -> str:
        return f"/v1/runs/{self.run}/steps/{step}/{what}"

    # -- datasets and runs

    def upload_dataset(self, dataset: str, prompts: Sequence[wire.PromptItem]) -> None:
        """Stores the prompts in this order, unless they are there."""
        for start in range(0, len(prompts), UPLOAD_CHUNK):
            chunk = list(prompts[start : start + UPLOAD_CHUNK])
            upload = wire.DatasetUpload(first_position=start, prompts=chunk)
            self._send("POST", f"/v1/datasets/{dataset}", json=upload.model_dump())

    def create_run(self, request: wire.RunCreate) -> wire.RunState:
        return self._ask(wire.RunState, "POST", "/v1/runs", json=request.model_dump())

    def runs(self, status: wire.Status | None = None) -> list[wire.RunState]:
        """All runs, or those of a status, the newest first."""
        found: list[wire.RunState] = []
        cursor: str | None = None
        while True:
            given = {"limit": 1000, "cursor": cursor, "status": status}
            params = {name: value for name, value in given.items() if value is not None}
            page = self._ask(wire.Page[wire.RunState], "GET", "/v1/runs", params=params)
            found += page.items
            if (cursor := page.next) is None:
                return found

    def pause(self) -> wire.RunState:
        """No new prompts and batches until `resume`."""
        return self._ask(wire.RunState, "POST", f"/v1/runs/{self.run}/pause")

    def resume(self) -> wire.RunState:
        return self._ask(wire.RunState, "POST", f"/v1/runs/{self.run}/resume")

    def stop(self) -> wire.RunState:
        """Turns the run's processes away."""
        return self._ask(wire.RunState, "POST", f"/v1/runs/{self.run}/stop")

    def delete_run(self) -> None:
        """Deletes the run and its objects. There is no way back."""
        self._send("DELETE", f"/v1/runs/{self.run}")

    def run_state(self) -> wire.RunState:
        return self._ask(wire.RunState, "GET", f"/v1/runs/{self.run}")

    def begin_attempt(self) -> wire.RunState:
        """Supersedes every other process of the run; this client speaks for the new attempt."""
        state = self._ask(wire.RunState, "POST", f"/v1/runs/{self.run}/attempts")
        self.attempt = state.attempt
        return state

    def set_status(self, status: str) -> None:
        self._send("PATCH", f"/v1/runs/{self.run}", json={"status": status})

    # -- the step protocol

    def step_prompts(
        self, step: int, kind: wire.Kind = "fresh", generation_round: int = 0
    ) -> wire.StepPrompts:
        """The prompts of a step; waits until they are known."""
        params = {"kind": kind, "generation_round": generation_round, "wait": LONG_POLL_S}
        while True:
            path = self._step(step, "prompts")
            answer = self._ask(wire.StepPrompts, "POST", path, params=params)
            if answer.ready:
                return answer

    def post_groups(self, step: int, kind: wire.Kind, body: bytes) -> wire.GroupsAccepted:
        path = self._step(step, "groups")
        return self._ask(
            wire.GroupsAccepted, "POST", path, params={"kind": kind}, content=body, headers=ARROW
        )

    def batch(
        self, step: int, *, meanwhile: Callable[[], None] = lambda: None
    ) -> wire.BatchManifest:
        """The training batch of a step; waits until its groups have landed.

        `meanwhile` is called now and then, and ends the wait by raising.
        """
        while True:
            path = self._step(step, "batch")
            answer = self._ask(wire.BatchManifest, "POST", path, params={"wait": LONG_POLL_S})
            if answer.ready:
                return answer
            meanwhile()

    def post_proximal(self, step: int, body: bytes) -> None:
        self._send("POST", self._step(step, "proximal"), content=body, headers=ARROW)

    def commit(self, step: int, metrics: dict[str, float]) -> wire.RunState:
        return self._ask(
            wire.RunState, "POST", self._step(step, "commit"), json={"metrics": metrics}
        )

    def rewind(self, step: int) -> wire.RunState:
        path = f"/v1/runs/{self.run}/rewind"
        return self._ask(wire.RunState, "POST", path, json={"step": step})

    # -- weights, checkpoints, replicas

    def publish_weights(self, version: int, manifest_digest: str) -> wire.StoredVersion:
        path = f"/v1/runs/{self.run}/weights/{version}"
        body = {"manifest_digest": manifest_digest}
        return self._ask(wire.StoredVersion, "PUT", path, json=body)

    def weights(self, version: int, *, wait: float = 0.0) -> wire.StoredVersion:
        """404 (`ServiceError`) unless the version is published within `wait` seconds."""
        path = f"/v1/runs/{self.run}/weights/{version}"
        return self._ask(wire.StoredVersion, "GET", path, params={"wait": wait})

    def record_checkpoint(self, step: int, manifest_digest: str) -> None:
        path = f"/v1/runs/{self.run}/checkpoints/{step}"
        self._send("PUT", path, json={"manifest_digest": manifest_digest})

    def latest_checkpoint(self) -> wire.StoredVersion | None:
        answer = self._send("GET", f"/v1/runs/{self.run}/checkpoints/latest")
        stored: wire.StoredVersion | None = TypeAdapter(wire.StoredVersion | None).validate_json(
            answer.content
        )
        return stored

    def checkpoints(self) -> list[wire.CheckpointView]:
        """Those that are kept, the newest first."""
        return self._read(list[wire.CheckpointView], "checkpoints")

    def wanted(self, known: str = "", *, wait: float = 0.0) -> wire.TargetWeights:
        """What rollout replicas should serve; waits while it is what the tag `known` says."""
        return self._read(wire.TargetWeights, "wanted", known=known, wait=wait)

    def replicas(self, *, serving: str = "", wait: float = 0.0) -> list[wire.ReplicaView]:
        """All that ever reported; waits until one serves the weights with the digest `serving`."""
        return self._read(list[wire.ReplicaView], "replicas", serving=serving, wait=wait)

    def report_replica(self, name: str, report: wire.ReplicaReport) -> None:
        path = f"/v1/runs/{self.run}/replicas/{name}"
        self._send("PUT", path, json=report.model_dump())

    def post_spans(self, spans: wire.SpanBatch) -> None:
        self._send("POST", f"/v1/runs/{self.run}/spans", json=spans.model_dump())

    # -- statistics

    def spans(self, first_step: int, last_step: int) -> list[wire.SpanView]:
        """What all parts did while the trainer was at these steps, in order of time."""
        return self._read(list[wire.SpanView], "spans", first_step=first_step, last_step=last_step)

    def steps(self, after: int = 0) -> list[wire.StepView]:
        """All committed steps after `after`."""
        found: list[wire.StepView] = []
        while True:
            last = found[-1].step if found else after
            page = self._read(list[wire.StepView], "steps", after=last)
            if not page:
                return found
            found += page

    def evaluations(self) -> list[wire.Evaluation]:
        return self._read(list[wire.Evaluation], "evaluations")

    def evaluation_migration(self, before: int, after: int) -> wire.Migration:
        """Held-out prompts by bin at two policy versions."""
        return self._read(wire.Migration, "evaluations/migration", before=before, after=after)

    def difficulty_bins(self, step: int | None = None) -> wire.DifficultyBins:
        """Training prompts by bin, now or as of a step."""
        return self._read(wire.DifficultyBins, "difficulty/bins", step=step)

    def difficulty_history(self, points: int = 200) -> list[wire.DifficultyBins]:
        return self._read(list[wire.DifficultyBins], "difficulty/bins/history", points=points)

    def difficulty_migration(self, before: int, after: int) -> wire.DifficultyMigration:
        """Training prompts by bin at two steps."""
        return self._read(
            wire.DifficultyMigration, "difficulty/migration", before=before, after=after
        )

    def prompts(
        self, *, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> wire.Page[wire.DifficultyView]:
        """A page of training prompts. `filters`: bin, trend, unlocked_after, unlocked_until,
        search, order, as `GET /v1/runs/{run}/prompts` has them."""
        page = wire.Page[wire.DifficultyView]
        return self._read(page, "prompts", cursor=cursor, limit=limit, **filters)

    def all_prompts(self, **filters: Any) -> Iterator[wire.DifficultyView]:
        """Every prompt that passes the filters, page by page."""
        cursor: str | None = None
        while True:
            page = self.prompts(cursor=cursor, limit=1000, **filters)
            yield from page.items
            if (cursor := page.next) is None:
                return

    def prompt_history(self, uid: str) -> wire.PromptHistory:
        return self._read(wire.PromptHistory, "prompts/history", uid=uid)

    def decision(self, step: int, uid: str) -> wire.Decision:
        """Why a prompt is, or is not, in the batch of a step."""
        return self._read(wire.Decision, f"steps/{step}/decision", uid=uid)

    def buffer(self, buffer: wire.BufferName, step: int | None = None) -> list[wire.BufferItem]:
        """All that a buffer holds, now or as of a step."""
        found: list[wire.BufferItem] = []
        cursor: str | None = None
        while True:
            page = self._read(
                wire.Page[wire.BufferItem], f"buffers/{buffer}", step=step, cursor=cursor
            )
            found += page.items
            if (cursor := page.next) is None:
                return found

    def buffer_events(
        self,
        buffer: wire.BufferName,
        *,
        after: int = 0,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.Page[wire.BufferEvent]:
        page = wire.Page[wire.BufferEvent]
        path = f"buffers/{buffer}/events"
        return self._read(page, path, after=after, cursor=cursor, limit=limit)

    def batches(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> wire.Page[wire.BatchSummary]:
        return self._read(wire.Page[wire.BatchSummary], "batches", cursor=cursor, limit=limit)

    def recorded_batch(self, step: int) -> wire.BatchManifest:
        return self._read(wire.BatchManifest, f"batches/{step}")

    def batch_arrow(self, step: int) -> bytes:
        """The trajectories of a batch; `trajectories.decode_groups` reads them."""
        return bytes(self._send("GET", f"/v1/runs/{self.run}/batches/{step}/arrow").content)

    def group(self, group_id: int) -> wire.GroupView:
        return self._read(wire.GroupView, f"groups/{group_id}")

    def difficulty_parquet(self) -> bytes:
        return bytes(self._send("GET", f"/v1/runs/{self.run}/difficulty.parquet").content)

    def compare(self, other: str) -> wire.RunComparison:
        """This run and another side by side."""
        params = {"first": self.run, "second": other}
        return self._ask(wire.RunComparison, "GET", "/v1/comparisons", params=params)

    # -- tokens and garbage (scope admin)

    def create_token(self, name: str, scope: wire.Scope) -> wire.TokenCreated:
        body = {"name": name, "scope": scope}
        return self._ask(wire.TokenCreated, "POST", "/v1/tokens", json=body)

    def tokens(self) -> list[wire.TokenView]:
        return self._ask(list[wire.TokenView], "GET", "/v1/tokens")

    def revoke_token(self, token_id: int) -> wire.TokenView:
        return self._ask(wire.TokenView, "DELETE", f"/v1/tokens/{token_id}")

    def collect_garbage(self, *, dry_run: bool = True) -> wire.Garbage:
        return self._ask(wire.Garbage, "POST", "/v1/gc", params={"dry_run": dry_run})


class AsyncBufferClient:
    """The same calls from asynchronous code, each in a thread.

    `await client.call(BufferClient.prompts, bin=0)`
    """

    def __init__(self, client: BufferClient) -> None:
        self._client = client

    async def call(
        self,
        method: Callable[Concatenate[BufferClient, Parameters], Answer],
        *arguments: Parameters.args,
        **keywords: Parameters.kwargs,
    ) -> Answer:
        return await asyncio.to_thread(method, self._client, *arguments, **keywords)


def none_if_missing(ask: Callable[[], Answered]) -> Answered | None:
    """The service's answer; None if it knows of no such thing."""
    try:
        return ask()
    except ServiceError as error:
        if error.status != 404:
            raise
        return None
