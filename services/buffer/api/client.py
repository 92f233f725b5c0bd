"""Typed client of the buffer service. Other packages reach the service only through it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter

from bapo_core.errors import BapoError
from bapo_core.reward_files import digest_of_text
from services.buffer.api import wire
from services.common.errors import ServiceError
from services.common.http import GIVE_UP_AFTER_S, UNHURRIED, HttpClient
from services.common.scopes import Scope

Model = TypeVar("Model")
Result = TypeVar("Result")

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
BINARY = {"Content-Type": "application/octet-stream"}
LONG_POLL_S = 10.0
"""Seconds that one request waits for an answer that is not ready."""
PROMPTS_PER_UPLOAD = 5_000
IMAGES_PER_REQUEST = 1_000
BYTES_PER_UPLOAD = 8 << 20
"""Bytes of prompts as JSON in one request, half of the service's limit."""


class BufferClient:
    """Calls of one process to the buffer service, on behalf of an attempt of a run.

    Every call is repeated while the service does not answer. Every call may raise:

    - `ServiceUnavailable` when the service has not answered for `give_up_s` seconds;
    - `Superseded` when a newer attempt has taken over or the run was stopped: end the process;
    - `ServiceError` for any other refusal, with the HTTP status and a message that says why (404
      when the run does not exist).

    A run whose stored configuration cannot be read has a `wire.UnreadableConfig`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        run: str = "",
        attempt: int = 0,
        give_up_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        """Makes a client; nothing is sent yet.

        run: name of the run that all calls are about, except those that name no run.
        attempt: fencing number, as `begin_attempt` or `run_state` returned it.
        give_up_s: seconds for which a call is repeated while the service does not answer.
        """
        self.url = url.rstrip("/")
        self.run, self.attempt = run, attempt
        self._http = HttpClient("buffer service", url, token, give_up_s=give_up_s)

    def of_run(self, run: str) -> BufferClient:
        """Returns a client of another run, outside of its attempts, on the same connections."""
        client = copy.copy(self)
        client.run, client.attempt = run, 0
        return client

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _call(self, model: type[Model], method: str, path: str, **arguments: Any) -> Model:
        content = self._send(method, path, **arguments).content
        return TypeAdapter(model).validate_json(content)

    def _get(self, model: type[Model], path: str, **params: Any) -> Model:
        return self._call(model, "GET", f"/v1/runs/{self.run}/{path}", params=_without_none(params))

    def _get_all(self, item: type[Model], path: str, **params: Any) -> Iterator[Model]:
        """Yields the items of all pages of a list below `/v1`."""
        page_model: Any = wire.Page[item]  # type: ignore[valid-type]
        cursor: str | None = None
        while True:
            query = _without_none({**params, "cursor": cursor})
            page = self._call(page_model, "GET", f"/v1/{path}", params=query)
            yield from page.items
            if (cursor := page.next) is None:
                return

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"X-Bapo-Attempt": str(self.attempt), **arguments.pop("headers", {})}
        return self._http.call(method, path, headers=headers, **arguments)

    def _step_path(self, step: int, action: str) -> str:
        return f"/v1/runs/{self.run}/steps/{step}/{action}"

    # -- datasets and runs

    def upload_dataset(
        self,
        dataset: str,
        prompts: Sequence[wire.PromptItem],
        *,
        digest: str | None = None,
        source: str | None = None,
    ) -> None:
        """Stores prompts in this order; prompts that the dataset has are kept as they are.

        digest: SHA-256 of all prompts, which the dataset then keeps to. source: address that they
        were read from. Raises `ServiceError` (409) if the dataset has another digest, or if a run
        uses it and the upload would change it.
        """
        start = 0
        for part in _parts(prompts):
            upload = wire.DatasetUpload(
                first_position=start, prompts=part, digest=digest, source=source
            )
            self._send("POST", f"/v1/datasets/{dataset}", json=upload.model_dump())
            start += len(part)

    def missing_images(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests of the images that the object store does not have."""
        missing: list[str] = []
        for start in range(0, len(digests), IMAGES_PER_REQUEST):
            body = wire.ImageDigests(digests=list(digests[start : start + IMAGES_PER_REQUEST]))
            answer = self._call(
                wire.ImageDigests, "POST", "/v1/images/missing", json=body.model_dump()
            )
            missing += answer.digests
        return missing

    def upload_image(self, digest: str, data: bytes) -> None:
        """Stores an image by its digest. Raises `ServiceError` (400) for a file that is none."""
        self._send("PUT", f"/v1/images/{digest}", content=data, headers=BINARY)

    def image(self, digest: str) -> bytes:
        """Returns the bytes of an image. Raises `ServiceError` (404) if there is none."""
        data: bytes = self._send("GET", f"/v1/images/{digest}").content
        return data

    def upload_reward_file(self, text: str) -> str:
        """Stores a file of reward functions; returns its digest."""
        digest = digest_of_text(text)
        self._send("PUT", f"/v1/reward-files/{digest}", json={"text": text})
        return digest

    def reward_file(self, digest: str) -> str:
        """Returns the text of a file of reward functions, whose digest is checked.

        Raises `ServiceError` (404) if it is not stored.
        """
        text = self._call(wire.RewardFile, "GET", f"/v1/reward-files/{digest}").text
        if digest_of_text(text) != digest:
            raise BapoError(
                f"the buffer service's reward file {digest} has the digest "
                f"{digest_of_text(text)}; store it again by the command that starts the run"
            )
        return text

    def dataset(self, dataset: str) -> wire.DatasetState:
        """Returns a dataset without its prompts; one that does not exist has 0 prompts."""
        return self._call(wire.DatasetState, "GET", f"/v1/datasets/{dataset}")

    def datasets(self) -> list[wire.DatasetState]:
        """Returns every dataset, by name."""
        return list(self._get_all(wire.DatasetState, "datasets", limit=1000))

    def dataset_prompts(self, dataset: str) -> Iterator[wire.PromptItem]:
        """Yields the prompts of a dataset in their order."""
        yield from self._get_all(wire.PromptItem, f"datasets/{dataset}/prompts", limit=1000)

    def create_run(self, request: wire.RunCreate) -> wire.RunState:
        """Creates a run, or returns the existing one that was created by the same request.

        Raises `ServiceError`: 409 for an existing run that differs, 422 for an invalid
        configuration, 400 for a dataset without prompts.
        """
        return self._call(wire.RunState, "POST", "/v1/runs", json=request.model_dump())

    def fork_run(self, request: wire.ForkRequest) -> wire.RunState:
        """Makes a fork of this client's run, or returns the one made by the same request.

        Raises `ServiceError`: 409 for a step that may be trained again, for weights that are not
        stored any more, and for an existing run of this name; 422 for keys that the past depends on
        and for values that are not valid.
        """
        path = f"/v1/runs/{self.run}/forks"
        return self._call(wire.RunState, "POST", path, json=request.model_dump())

    def runs(self, status: wire.Status | None = None) -> list[wire.RunState]:
        """Returns all runs, or the runs with a status, newest first."""
        return list(self._get_all(wire.RunState, "runs", status=status, limit=1000))

    def store_config(self, name: str, text: str) -> wire.NamedConfig:
        """Stores a configuration (YAML) by name, in place of any other of this name.

        Raises `ServiceError` (422) when it is invalid.
        """
        return self._call(wire.NamedConfig, "PUT", f"/v1/configs/{name}", json={"text": text})

    def config(self, name: str) -> wire.NamedConfig:
        """Returns a stored configuration. Raises `ServiceError` (404) if there is none."""
        return self._call(wire.NamedConfig, "GET", f"/v1/configs/{name}")

    def configs(self) -> list[wire.NamedConfig]:
        """Returns every stored configuration, by name."""
        return list(self._get_all(wire.NamedConfig, "configs", limit=1000))

    def take_turn(
        self, *, reopen: bool = False, workflow: str | None = None, instead_of: str | None = None
    ) -> wire.Turn:
        """Starts the run if no other run is in front of it, and queues it otherwise.

        reopen: continue a run that was stopped or has failed. workflow: Argo workflow that trains
        the run, as `namespace/name`. instead_of: the one that has ended, and from which it takes
        the run over. Raises `ServiceError` (409) for a stopped or failed run without `reopen`, and
        for one that another workflow trains.
        """
        request = wire.TurnRequest(reopen=reopen, workflow=workflow, instead_of=instead_of)
        return self._call(wire.Turn, "POST", f"/v1/runs/{self.run}/turn", json=request.model_dump())

    def pause(self) -> wire.RunState:
        """Pauses the run: it gets no new prompts and batches until `resume`.

        Raises `ServiceError` (409) unless the run is running or paused.
        """
        return self._call(wire.RunState, "POST", f"/v1/runs/{self.run}/pause")

    def resume(self) -> wire.RunState:
        """Resumes the run. Raises `ServiceError` (409) unless it is paused or running."""
        return self._call(wire.RunState, "POST", f"/v1/runs/{self.run}/resume")

    def stop(
        self, *, by: str | None = None, reason: str | None = None, workflow: str | None = None
    ) -> wire.RunState:
        """Stops the run: the next call of each of its processes raises `Superseded`.

        by: who stops it; None for the name of this client's token. reason: why. workflow: stop the
        run only if this workflow trains it, and raise `ServiceError` (409) otherwise.
        """
        request = wire.StopRequest(by=by, reason=reason, workflow=workflow)
        return self._call(
            wire.RunState, "POST", f"/v1/runs/{self.run}/stop", json=request.model_dump()
        )

    def delete_run(self) -> None:
        """Deletes the run and its objects, irrevocably.

        Raises `ServiceError` (409) while the run is running or paused.
        """
        self._send("DELETE", f"/v1/runs/{self.run}", timeout=UNHURRIED)

    def run_state(self) -> wire.RunState:
        """Returns the run: its configuration, its status and its last committed step."""
        return self._call(wire.RunState, "GET", f"/v1/runs/{self.run}")

    def begin_attempt(self, *, reopen: bool = False) -> wire.RunState:
        """Begins a new attempt, on whose behalf this client acts from now on.

        Supersedes every other process of the run and rewinds it to its last checkpoint. reopen:
        continue a run that was stopped or has failed, and end a pause, as a person asks for.

        Raises `ServiceError` (409) for a stopped or failed run without `reopen`.
        """
        path = f"/v1/runs/{self.run}/attempts"
        state = self._call(wire.RunState, "POST", path, params={"reopen": reopen})
        self.attempt = state.attempt
        return state

    def change_config(
        self,
        values: Mapping[str, Any],
        *,
        by: str | None = None,
        workflow: str | None = None,
        instead_of: str | None = None,
    ) -> wire.RunState:
        """Gives keys of the configuration new values, from the step after the last checkpoint on.

        Supersedes every process of the run and rewinds it to that checkpoint, unless the keys have
        these values already. values: by dotted key. by: who changes them; None for the name of this
        client's token. workflow: change them only if no other workflow than this one and
        `instead_of`, which has ended, trains the run.

        Raises `ServiceError`: 422 for keys that may not change, and for values that are not valid,
        and 409 if another workflow trains the run.
        """
        request = wire.ChangeRequest(
            values=dict(values), by=by, workflow=workflow, instead_of=instead_of
        )
        path = f"/v1/runs/{self.run}/changes"
        return self._call(wire.RunState, "POST", path, json=request.model_dump())

    def set_status(self, status: wire.FinalStatus) -> None:
        """Records how the run ended."""
        self._end(wire.RunPatch(status=status))

    def stop_own(self, *, by: str, reason: str) -> None:
        """Stops the run on behalf of this client's attempt, which must be the current one.

        by: the process that stops it. reason: why; its end is cut off if it is too long.
        """
        self._end(wire.RunPatch(status="stopped", by=by, reason=reason[: wire.LONGEST_REASON]))

    def _end(self, change: wire.RunPatch) -> None:
        self._send("PATCH", f"/v1/runs/{self.run}", json=change.model_dump())

    # -- the step protocol

    def stored_config(self) -> dict[str, Any]:
        """Returns the run's configuration as it is stored, of which the digest chain is made."""
        config: dict[str, Any] = self._send("GET", f"/v1/runs/{self.run}").json()["config"]
        return config

    def step_prompts(
        self,
        step: int,
        kind: wire.Kind = "fresh",
        generation_round: int = 0,
        *,
        evaluation_set: str | None = None,
    ) -> wire.StepPrompts:
        """Returns the prompts of a step; waits until they are known.

        evaluation_set: name of the set of an evaluation; None is the primary one, here and below.

        Their policy version becomes the target of the rollout replicas. All its requests are made
        on behalf of the attempt at the time of the call.
        """
        headers = {"X-Bapo-Attempt": str(self.attempt)}
        params = _without_none(
            {
                "kind": kind,
                "generation_round": generation_round,
                "evaluation_set": evaluation_set,
                "wait": LONG_POLL_S,
            }
        )
        path = self._step_path(step, "prompts")
        while True:
            prompts = self._call(wire.StepPrompts, "POST", path, params=params, headers=headers)
            if prompts.ready:
                return prompts

    def post_groups(
        self,
        step: int,
        kind: wire.Kind,
        body: bytes,
        *,
        weights: str | None = None,
        evaluation_set: str | None = None,
    ) -> wire.GroupsAccepted:
        """Sends whole groups, encoded by `trajectories.encode_groups`.

        weights: manifest digest of the weights that made them. A group that was recorded before
        counts as a duplicate. Raises `ServiceError`: 400 if a group is not one of this step and
        kind, 409 if their policy version has other weights now.
        """
        params = _without_none({"kind": kind, "weights": weights, "evaluation_set": evaluation_set})
        path = self._step_path(step, "groups")
        return self._call(
            wire.GroupsAccepted, "POST", path, params=params, content=body, headers=ARROW
        )

    def batch(
        self, step: int, *, meanwhile: Callable[[], None] = lambda: None
    ) -> wire.BatchManifest:
        """Returns the training batch of a step; waits until all its groups are recorded.

        Calls `meanwhile` every `LONG_POLL_S` seconds, which ends the wait by raising.
        """
        path = self._step_path(step, "batch")
        while True:
            manifest = self._call(wire.BatchManifest, "POST", path, params={"wait": LONG_POLL_S})
            if manifest.ready:
                return manifest
            meanwhile()

    def post_proximal(self, step: int, body: bytes) -> None:
        """Sends the trainer's log-probs at this step, encoded by `trajectories.encode_proximal`."""
        self._send("POST", self._step_path(step, "proximal"), content=body, headers=ARROW)

    def commit(
        self, step: int, metrics: dict[str, float], digests: wire.StepDigests | None = None
    ) -> wire.RunState:
        """Commits a step with the trainer's metrics; committing it again changes nothing.

        Raises `ServiceError` (409) if the batch of the step was not built.
        """
        path = self._step_path(step, "commit")
        body = wire.Commit(metrics=metrics, digests=digests)
        return self._call(wire.RunState, "POST", path, json=body.model_dump())

    def rewind(self, step: int) -> wire.RunState:
        """Restores the state after the commit of `step`, and drops everything later.

        Raises `ServiceError` (409) for a step that is not committed.
        """
        path = f"/v1/runs/{self.run}/rewind"
        return self._call(wire.RunState, "POST", path, json={"step": step})

    # -- weights, checkpoints, replicas, spans

    def publish_weights(self, version: int, manifest_digest: str) -> wire.StoredVersion:
        """Publishes a policy version whose files and manifest are in the object store.

        Raises `ServiceError`: 409 if it was published with another digest, 400 if the step before
        it is not committed.
        """
        path = f"/v1/runs/{self.run}/weights/{version}"
        body = {"manifest_digest": manifest_digest}
        return self._call(wire.StoredVersion, "PUT", path, json=body)

    def weights(self, version: int, *, wait: float = 0.0) -> wire.StoredVersion:
        """Returns where a policy version is stored.

        Raises `ServiceError` (404) unless it is published within `wait` seconds (at most 30).
        """
        path = f"/v1/runs/{self.run}/weights/{version}"
        return self._call(wire.StoredVersion, "GET", path, params={"wait": wait})

    def record_checkpoint(self, step: int, manifest_digest: str) -> None:
        """Records the checkpoint after `step`, whose files are in the object store.

        The service deletes checkpoints and weights that the run no longer keeps. Raises
        `ServiceError` for a step that is not committed (400), or that has a checkpoint with
        another digest (409).
        """
        path = f"/v1/runs/{self.run}/checkpoints/{step}"
        self._send("PUT", path, json={"manifest_digest": manifest_digest})

    def latest_checkpoint(self) -> wire.StoredVersion | None:
        """Returns the checkpoint from which a new attempt starts; None before the first."""
        response = self._send("GET", f"/v1/runs/{self.run}/checkpoints/latest")
        stored: wire.StoredVersion | None = TypeAdapter(wire.StoredVersion | None).validate_json(
            response.content
        )
        return stored

    def checkpoints(self) -> list[wire.CheckpointView]:
        """Returns the checkpoints that are kept, newest first."""
        return self._get(list[wire.CheckpointView], "checkpoints")

    def target_weights(self, tag: str = "", *, wait: float = 0.0) -> wire.TargetWeights:
        """Returns the weights that rollout replicas should serve.

        Waits up to `wait` seconds (at most 30) while they are those of an earlier answer's `tag`.
        """
        return self._get(wire.TargetWeights, "target", known=tag, wait=wait)

    def replicas(self, *, serving: str = "", wait: float = 0.0) -> list[wire.ReplicaView]:
        """Returns all replicas that have ever reported.

        Waits up to `wait` seconds (at most 30) until one has loaded the weights with the manifest
        digest `serving`.
        """
        return self._get(list[wire.ReplicaView], "replicas", serving=serving, wait=wait)

    def replica_credentials(
        self, *, serving: str = "", wait: float = 0.0
    ) -> list[wire.CallableReplica]:
        """Returns what `replicas` does, with the credential that each replica requires.

        Only collectors and trainers may ask for it.
        """
        return self._get(
            list[wire.CallableReplica], "replicas/credentials", serving=serving, wait=wait
        )

    def report_replica(self, name: str, report: wire.ReplicaReport) -> None:
        """Records the state of a rollout replica."""
        path = f"/v1/runs/{self.run}/replicas/{name}"
        self._send("PUT", path, json=report.model_dump())

    def post_spans(self, spans: wire.SpanBatch) -> None:
        """Records spans of a component; each once, however often it is sent."""
        self._send("POST", f"/v1/runs/{self.run}/spans", json=spans.model_dump())

    # -- queries

    def spans(self, first_step: int, last_step: int) -> list[wire.SpanView]:
        """Returns the spans of all components while the trainer was at these steps, by time.

        Raises `ServiceError` (400) if there are too many for one answer.
        """
        return self._get(list[wire.SpanView], "spans", first_step=first_step, last_step=last_step)

    def steps(self, after: int = 0) -> list[wire.StepView]:
        """Returns all committed steps after `after`, in order."""
        steps: list[wire.StepView] = []
        while True:
            last = steps[-1].step if steps else after
            page = self._get(list[wire.StepView], "steps", after=last)
            if not page:
                return steps
            steps += page

    def progress(self) -> wire.RunProgress:
        """Returns what the run works at: the groups that it waits for, or its training batch."""
        return self._get(wire.RunProgress, "progress")

    def evaluations(self, evaluation_set: str | None = None) -> list[wire.Evaluation]:
        """Returns all complete evaluations on a set, by policy version."""
        return self._get(list[wire.Evaluation], "evaluations", evaluation_set=evaluation_set)

    def evaluation_sets(self) -> list[wire.EvaluationSetView]:
        """Returns the evaluation sets of the run by name, with all evaluations on them."""
        return self._get(list[wire.EvaluationSetView], "evaluation-sets")

    def evaluation_migration(
        self, before: int, after: int, evaluation_set: str | None = None
    ) -> wire.Migration:
        """Returns how the prompts of a set moved between bins between two policy versions.

        Raises `ServiceError` (404) unless both were evaluated.
        """
        return self._get(
            wire.Migration,
            "evaluations/migration",
            before=before,
            after=after,
            evaluation_set=evaluation_set,
        )

    def difficulty_bins(self, step: int | None = None) -> wire.DifficultyBins:
        """Returns training prompts by bin as of a step, by default the last committed one."""
        return self._get(wire.DifficultyBins, "difficulty/bins", step=step)

    def difficulty_history(self, points: int = 200) -> list[wire.DifficultyBins]:
        """Returns training prompts by bin at up to `points` evenly spaced steps."""
        return self._get(list[wire.DifficultyBins], "difficulty/bins/history", points=points)

    def difficulty_migration(self, before: int, after: int) -> wire.DifficultyMigration:
        """Returns how training prompts moved between bins between two steps.

        Raises `ServiceError` (400) for a step that is not committed.
        """
        return self._get(
            wire.DifficultyMigration, "difficulty/migration", before=before, after=after
        )

    def prompts(
        self, *, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> wire.Page[wire.DifficultyView]:
        """Returns a page of the attempted training prompts.

        filters: bin, trend, unlocked_after, unlocked_until, search and order, as the parameters of
        `GET /v1/runs/{run}/prompts`.
        """
        page = wire.Page[wire.DifficultyView]
        return self._get(page, "prompts", cursor=cursor, limit=limit, **filters)

    def all_prompts(self, **filters: Any) -> Iterator[wire.DifficultyView]:
        """Yields every attempted training prompt that passes the filters of `prompts`."""
        path = f"runs/{self.run}/prompts"
        yield from self._get_all(wire.DifficultyView, path, limit=1000, **filters)

    def prompt_history(self, uid: str) -> wire.PromptHistory:
        """Returns every group of a prompt and its time in the buffers.

        Raises `ServiceError` (404) for a prompt that is in no dataset of the run.
        """
        return self._get(wire.PromptHistory, "prompts/history", uid=uid)

    def decision(self, step: int, uid: str) -> wire.Decision:
        """Returns why a prompt is, or is not, in the batch of a step.

        Raises `ServiceError` (404) if the batch was not built, or the prompt does not exist.
        """
        return self._get(wire.Decision, f"steps/{step}/decision", uid=uid)

    def buffers(self, step: int | None = None) -> list[wire.BufferSummary]:
        """Returns the sizes of both buffers as of a step, by default the last committed one."""
        return self._get(list[wire.BufferSummary], "buffers", step=step)

    def buffer(self, buffer: wire.BufferName, step: int | None = None) -> list[wire.BufferItem]:
        """Returns all entries of a buffer as of a step, by default the last committed one."""
        path = f"runs/{self.run}/buffers/{buffer}"
        return list(self._get_all(wire.BufferItem, path, step=step))

    def buffer_events(
        self,
        buffer: wire.BufferName,
        *,
        after: int = 0,
        page_size: int = 1000,
    ) -> Iterator[wire.BufferEvent]:
        """Yields the admissions to a buffer and evictions from it after a step, in order."""
        path = f"runs/{self.run}/buffers/{buffer}/events"
        yield from self._get_all(wire.BufferEvent, path, after=after, limit=page_size)

    def batches(self, *, after: int = 0, page_size: int = 1000) -> Iterator[wire.BatchSummary]:
        """Yields the compositions of the batches after a step, by step."""
        path = f"runs/{self.run}/batches"
        yield from self._get_all(wire.BatchSummary, path, after=after, limit=page_size)

    def recorded_batch(self, step: int) -> wire.BatchManifest:
        """Returns a batch that was built. Raises `ServiceError` (404) if it was not."""
        return self._get(wire.BatchManifest, f"batches/{step}")

    def batch_arrow(self, step: int) -> bytes:
        """Returns the trajectories of a batch, for `trajectories.decode_groups`.

        Raises `ServiceError` (404) if the batch was not built.
        """
        return bytes(self._send("GET", f"/v1/runs/{self.run}/batches/{step}/arrow").content)

    def group(self, group_id: int, *, tokens: bool = False) -> wire.GroupView:
        """Returns a group with its trajectories. Raises `ServiceError` (404) for an unknown id.

        tokens: with the text of each token.
        """
        params = {"tokens": tokens} if tokens else {}
        return self._get(wire.GroupView, f"groups/{group_id}", **params)

    def responses(self, *, page_size: int = 50, **filters: Any) -> Iterator[wire.ListedResponse]:
        """Yields what the model wrote, by step and group.

        filters: evaluation_set, first, last, correct and contains, as the parameters of
        `GET /v1/runs/{run}/responses`.
        """
        path = f"runs/{self.run}/responses"
        yield from self._get_all(wire.ListedResponse, path, limit=page_size, **filters)

    def groups_arrow(self, first: int, last: int) -> bytes:
        """Returns summaries of the training groups of these steps as an Arrow IPC stream."""
        path = f"/v1/runs/{self.run}/groups.arrow"
        return bytes(self._send("GET", path, params={"first": first, "last": last}).content)

    def difficulty_parquet(self) -> bytes:
        """Returns the difficulty table of the run as a Parquet file."""
        return bytes(self._send("GET", f"/v1/runs/{self.run}/difficulty.parquet").content)

    def compare(self, *others: str) -> wire.RunComparison:
        """Compares this run with others."""
        params = {"run": [self.run, *others]}
        return self._call(wire.RunComparison, "GET", "/v1/comparisons", params=params)

    # -- tokens and garbage (scope admin)

    def create_token(
        self, name: str, scope: Scope, *, run: str | None = None, days: float | None = None
    ) -> wire.TokenCreated:
        """Creates a token. The service never shows its secret again.

        run: name of the only run that the token is for. days: time after which it expires.
        """
        body = _without_none({"name": name, "scope": scope, "run": run, "days": days})
        return self._call(wire.TokenCreated, "POST", "/v1/tokens", json=body)

    def tokens(self) -> list[wire.TokenView]:
        """Returns all tokens ever created, without their secrets."""
        return self._call(list[wire.TokenView], "GET", "/v1/tokens")

    def revoke_token(self, token_id: int) -> wire.TokenView:
        """Revokes a token. Raises `ServiceError` (404) for an unknown id."""
        return self._call(wire.TokenView, "DELETE", f"/v1/tokens/{token_id}")

    def collect_garbage(self, *, dry_run: bool = True) -> wire.Garbage:
        """Lists objects that no row refers to, and deletes them after a day unless `dry_run`."""
        query = {"dry_run": dry_run}
        return self._call(wire.Garbage, "POST", "/v1/gc", params=query, timeout=UNHURRIED)


def _parts(prompts: Sequence[wire.PromptItem]) -> Iterator[list[wire.PromptItem]]:
    """Yields the prompts in parts that fit into one request each."""
    part: list[wire.PromptItem] = []
    size = 0
    for prompt in prompts:
        prompt_size = len(prompt.model_dump_json())
        if part and (len(part) == PROMPTS_PER_UPLOAD or size + prompt_size > BYTES_PER_UPLOAD):
            yield part
            part, size = [], 0
        part.append(prompt)
        size += prompt_size
    if part:
        yield part


def none_if_missing(call: Callable[[], Result]) -> Result | None:
    """Returns the result of a client's call, or None if the service answers 404."""
    try:
        return call()
    except ServiceError as error:
        if error.status != 404:
            raise
        return None


def _without_none(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}
