"""The typed client of the buffer service: the one way that other parts reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from services.buffer import wire
from services.common.http import HttpClient

Model = TypeVar("Model", bound=BaseModel)

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
LONG_POLL_S = 10.0
UPLOAD_CHUNK = 5_000


class BufferClient:
    """Calls of one process on behalf of a run's attempt; all of them may be repeated."""

    def __init__(self, url: str, token: str, *, run: str = "", attempt: int = 0) -> None:
        self.run, self.attempt = run, attempt
        self._http = HttpClient("buffer service", url, token)

    def close(self) -> None:
        self._http.close()

    def _ask(self, model: type[Model], method: str, path: str, **arguments: Any) -> Model:
        return model.model_validate_json(self._send(method, path, **arguments).content)

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

    def runs(self) -> list[wire.RunState]:
        answer = self._send("GET", "/v1/runs")
        return TypeAdapter(list[wire.RunState]).validate_json(answer.content)

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

    def batch(self, step: int) -> wire.BatchManifest:
        """The training batch of a step; waits until its groups have landed."""
        while True:
            path = self._step(step, "batch")
            answer = self._ask(wire.BatchManifest, "POST", path, params={"wait": LONG_POLL_S})
            if answer.ready:
                return answer

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
        return TypeAdapter(wire.StoredVersion | None).validate_json(answer.content)

    def report_replica(self, name: str, loaded_version: int) -> None:
        path = f"/v1/runs/{self.run}/replicas/{name}"
        self._send("PUT", path, json={"loaded_version": loaded_version})

    # -- statistics

    def steps(self, after: int = 0) -> list[wire.StepView]:
        """All committed steps after `after`."""
        found: list[wire.StepView] = []
        while True:
            last = found[-1].step if found else after
            answer = self._send("GET", f"/v1/runs/{self.run}/steps", params={"after": last})
            page = TypeAdapter(list[wire.StepView]).validate_json(answer.content)
            if not page:
                return found
            found += page

    def evaluations(self) -> list[wire.Evaluation]:
        answer = self._send("GET", f"/v1/runs/{self.run}/evaluations")
        return TypeAdapter(list[wire.Evaluation]).validate_json(answer.content)

    def migration(self, before: int, after: int) -> wire.Migration:
        params = {"before": before, "after": after}
        return self._ask(wire.Migration, "GET", f"/v1/runs/{self.run}/migration", params=params)

    def difficulty_bins(self) -> list[int]:
        answer = self._send("GET", f"/v1/runs/{self.run}/difficulty/bins")
        return TypeAdapter(list[int]).validate_json(answer.content)

    def difficulty(self, after: str = "", limit: int = 1000) -> wire.DifficultyPage:
        params = {"after": after, "limit": limit}
        return self._ask(
            wire.DifficultyPage, "GET", f"/v1/runs/{self.run}/difficulty", params=params
        )

    def buffer(self, buffer: wire.Buffer, step: int | None = None) -> list[wire.BufferItem]:
        params = {} if step is None else {"step": step}
        answer = self._send("GET", f"/v1/runs/{self.run}/buffers/{buffer}", params=params)
        return TypeAdapter(list[wire.BufferItem]).validate_json(answer.content)

    def recorded_batch(self, step: int) -> wire.BatchManifest:
        return self._ask(wire.BatchManifest, "GET", f"/v1/runs/{self.run}/batches/{step}")

    def group(self, group_id: int) -> wire.GroupView:
        return self._ask(wire.GroupView, "GET", f"/v1/runs/{self.run}/groups/{group_id}")
