"""Bodies of the pipeline's components, one function for each.

Each component may be repeated at any time: the progress of a run is the state of the buffer service
alone, and no component passes progress on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import yaml

from bapo_core.config import ConfigHistory, RunConfig, flatten
from bapo_core.config.changes import CHANGEABLE, may_change
from bapo_core.errors import BapoError, ConfigError, TransientError
from pipelines.backends import TrainerBackend, remove_job
from pipelines.job_watch import JobWatch
from pipelines.naming import check_run_name, name_run
from pipelines.settings import (
    DeploymentSettings,
    JobKindName,
    LocalJobsSettings,
    RetrySettings,
    StepSettings,
)
from pipelines.training_job import (
    Deployment,
    Owner,
    Resources,
    TrainingJob,
    job_name,
)
from pipelines.waiting import WaitLog
from services.buffer.api import wire
from services.buffer.api.client import BufferClient, none_if_missing
from services.common import layout
from services.common.errors import ServiceError
from services.common.layout import MODEL_SCHEME
from services.common.objectstore import S3_SCHEME, FileContent, ObjectStore
from services.common.printable import escape_controls
from services.common.process import end_with_parent, stop_on_signals
from services.exporters.mlflow import mirror_to_mlflow, update_mlflow

if TYPE_CHECKING:
    from services.report.summary import RunHistory

POLL_INTERVAL_S = 2.0
BUFFER_GIVE_UP_S = 900.0
"""Seconds for which a step repeats calls of the buffer service, because Kubeflow does not repeat a
step that fails."""
REPLICA_GONE_AFTER_S = 30.0
"""Age of a replica's last heartbeat, in seconds, beyond which the pipeline does not wait for it.
It is longer than `wire.HEARTBEAT_TIMEOUT_S`: a replica that restarts comes back within it."""
BUCKET_CHECK_INTERVAL_S = 60.0
"""Seconds between two checks of the bucket while a step waits."""
KUEUE_FRAMEWORKS: dict[JobKindName, str] = {
    "PyTorchJob": "kubeflow.org/pytorchjob",
    "TrainJob": "trainer.kubeflow.org/trainjob",
}
"""Name of each kind of job among `integrations.frameworks` of Kueue's configuration."""
KUEUE_TIMEOUT_S = 30.0
"""Seconds within which Kueue notices a job that it manages."""
MAX_REASON = 2000
"""Characters of the reason of a stop that the buffer service takes."""
LAST_ERROR = "last-error"
"""File in the directory of local jobs with the error of the last step that failed."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """Services that a step of the pipeline works with."""

    buffer: BufferClient
    store: ObjectStore
    scratch: Path
    """Directory for models in transfer."""
    log: Callable[[str], None]
    workflow: str | None = None
    """The Argo workflow that the step belongs to, as `namespace/name`; None outside a cluster."""
    may_reopen: bool = True
    """Whether the step may continue a run that was stopped. An automatic retry may not: it would
    undo a `bapo stop` that ended the attempt before."""
    buffer_url: str = ""
    """Address of the buffer service inside the cluster."""
    dashboard_url: str = ""
    """Address at which people reach the dashboard; empty where the chart exposes none."""

    @classmethod
    def from_environment(cls, run: str, kubeflow_run: str = "") -> PipelineContext:
        """Connects to the services that the connection ConfigMap and the Secrets name.

        run: the parameter `bapo_run`. kubeflow_run: Kubeflow's name of the run, from which the
        run's name is made if `run` is empty.

        Raises `ConfigError` when a variable is missing or invalid.
        """
        settings = StepSettings.load()
        run = name_run(run, kubeflow_run, settings.workflow)
        workflow = None
        if settings.workflow and LocalJobsSettings.load().local_jobs is None:
            from pipelines.cluster import current_namespace

            workflow = f"{current_namespace()}/{settings.workflow}"
        return cls(
            BufferClient(
                settings.buffer_url,
                settings.token.get_secret_value(),
                run=run,
                give_up_s=BUFFER_GIVE_UP_S,
            ),
            ObjectStore(settings.s3),
            settings.scratch,
            # The same stream as the last line of a step that fails, which would else be overtaken.
            lambda line: print(escape_controls(line), file=sys.stderr, flush=True),
            workflow=workflow,
            may_reopen=RetrySettings().kfp_retry_index == 0,
            buffer_url=settings.buffer_url,
            dashboard_url=(settings.dashboard_url or "").rstrip("/"),
        )

    @property
    def name(self) -> str:
        """The name under which this step stops a run."""
        if self.workflow is None:
            return "`bapo pipeline run-local`"
        return f"workflow {self.workflow}"

    def owns(self, state: wire.RunState) -> bool:
        """Returns whether the step's workflow is the one that trains the run."""
        return state.workflow == self.workflow


@dataclass(frozen=True, slots=True)
class TrainerJobs:
    """Where training jobs run, and the workflow that owns them."""

    backend: TrainerBackend
    deployment: Deployment
    owner: Owner | None = None
    is_cancelled: Callable[[], bool] = lambda: True
    """Whether a step that gets SIGTERM belongs to a pipeline that was cancelled, rather than to one
    whose node is drained."""

    def job_name(self, run: str) -> str:
        return job_name(self.deployment.release, run)

    @classmethod
    def from_environment(cls) -> TrainerJobs:
        """Uses processes of this machine when `BAPO_LOCAL_JOBS` is set, and otherwise the cluster.

        Raises `ConfigError` when the connection ConfigMap is missing or invalid.
        """
        directory = LocalJobsSettings.load().local_jobs
        if directory is not None:
            from pipelines.local_jobs import LocalBackend

            deployment = Deployment.from_settings(DeploymentSettings.load(), "local")
            return cls(LocalBackend(directory), deployment)
        from pipelines.cluster import STEP_RETRY_FOR_S, current_namespace
        from pipelines.kubeflow import KubeflowBackend

        namespace = current_namespace()
        deployment = Deployment.from_settings(DeploymentSettings.load(), namespace)
        backend = KubeflowBackend(namespace, deployment.release, retry_for_s=STEP_RETRY_FOR_S)
        workflow = StepSettings.load().workflow
        return cls(
            backend, deployment, backend.owner(workflow), partial(backend.is_terminating, workflow)
        )


@contextmanager
def pipeline_step(
    run: str, kubeflow_run: str = ""
) -> Iterator[tuple[PipelineContext, TrainerJobs]]:
    """Yields the context of a step, and ends the step with one line when it fails.

    A `BapoError` becomes the last line of the step's log. A step that fails or is cancelled deletes
    the job and stops the run, if they are its workflow's: Kubeflow repeats neither the step nor, in
    a run that was retried, *clean-up*. When the pipeline is cancelled, Kubeflow sends SIGTERM to
    the step. The clients for that are made first, because Kubernetes kills the step soon
    afterwards.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    local_jobs = LocalJobsSettings.load().local_jobs
    try:
        context = PipelineContext.from_environment(run, kubeflow_run)
        jobs = TrainerJobs.from_environment()
        if local_jobs is not None:
            end_with_parent()  # `bapo pipeline run-local` cancels the run itself
        else:
            stop_on_signals()
        try:
            yield context, jobs
        except SystemExit:
            if local_jobs is None and jobs.is_cancelled():
                cancel(context, jobs, "its pipeline was terminated")
            raise
        except TransientError:
            raise  # what is away cannot be told
        except BapoError as error:
            if local_jobs is None:
                _give_up_run(context, jobs, error)
            raise
    except BapoError as error:
        if local_jobs is not None:
            local_jobs.mkdir(parents=True, exist_ok=True)
            (local_jobs / LAST_ERROR).write_text(str(error))
        raise SystemExit(f"error: {error}") from None


def _give_up_run(context: PipelineContext, jobs: TrainerJobs, error: BapoError) -> None:
    """Deletes the job and stops the run of a step that has failed with `error`."""
    try:
        cancel(context, jobs, f"a step of its pipeline failed: {error}")
    except BapoError as second:
        context.log(f"the run could not be stopped: {second}")


def cancel(context: PipelineContext, jobs: TrainerJobs, reason: str) -> None:
    """Deletes the job and stops the run, whose other processes then leave it.

    A job or a run of another workflow is left as it is. reason: why the run is stopped, as its
    processes and pages show it.
    """
    if not _may_exist(context):
        return
    jobs.backend.delete(jobs.job_name(context.buffer.run), context.workflow)
    stop_run(context, reason)


def _may_exist(context: PipelineContext) -> bool:
    """Returns whether the run's name is valid, without which there is no run, and logs if not."""
    try:
        check_run_name(context.buffer.run)
    except ConfigError:
        context.log(f"no run was created: {context.buffer.run!r} is no valid name")
        return False
    return True


def stop_run(context: PipelineContext, reason: str) -> None:
    """Stops the run if this step's workflow trains it, and logs the run's status."""
    buffer = context.buffer
    state = none_if_missing(buffer.run_state)
    if state is None:
        context.log("no run was created")
        return
    if not context.owns(state):
        owner = f"workflow {state.workflow}" if state.workflow else "no workflow"
        context.log(f"{owner} trains run {state.name}, which is left as it is: {state.status}")
        return
    if state.status not in wire.UNFINISHED_STATUSES:
        context.log(f"run {state.name} is {state.status}")
        return
    # The service compares again: another pipeline may have taken the run over meanwhile.
    state = buffer.stop(by=context.name, reason=reason[:MAX_REASON], workflow=context.workflow)
    context.log(
        f"run {state.name} is {state.status} at step {state.current_step}; start the pipeline with "
        f"bapo_run={state.name} and the same configuration to continue it"
    )


# ---- before the training ------------------------------------------------------------------------


def import_model(context: PipelineContext, directory: Path) -> str:
    """Stores a model that Kubeflow imported, and returns its `model.path`.

    Raises `BapoError` unless it is a model directory.
    """
    from services.model.resolve import find_model
    from services.model.stored import store_model

    path = store_model(context.store, find_model(str(directory), context.scratch))
    context.log(f"model {path}")
    return path


def _ending_of(beginning: bytes) -> str:
    """Returns the suffix of a data file's name, by the file's first bytes."""
    if beginning.startswith(b"PAR1"):
        return ".parquet"
    return ".json" if beginning.lstrip().startswith(b"[") else ".jsonl"


def import_data(context: PipelineContext, file: Path) -> str:
    """Stores a data set that Kubeflow imported, and returns its address for `task.train_path`.

    The artifact of an earlier step has a name without an ending, so the ending of the address says
    what the file holds. Raises `BapoError` unless it is a file.
    """
    if not file.is_file():
        raise BapoError(
            f"{file.name}: the artifact is no file; import a Parquet, JSONL or JSON file"
        )
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        opened.seek(0)
        name = file.name if file.suffix else file.name + _ending_of(opened.read(1024))
    key = layout.imported(digest, name)
    context.store.put_content(key, FileContent(file))
    address = f"{S3_SCHEME}{context.store.settings.bucket}/{key}"
    context.log(f"data set {address}")
    return address


def check_run(context: PipelineContext, jobs: TrainerJobs, fork_of: str = "") -> None:
    """Logs whether the pipeline creates the run, as a fork of run `fork_of`, or continues it.

    Raises `ConfigError` for a name that is not valid, and `BapoError` for a run that another
    workflow trains, or that is being deleted.
    """
    name = context.buffer.run
    check_run_name(name)
    state = none_if_missing(context.buffer.run_state)
    if state is None:
        made = f"made as a fork of run {fork_of}" if fork_of else "trained from its first step"
        context.log(f"run {name} does not exist: it is created, and {made}")
        return
    if state.status == "deleting":
        raise BapoError(
            f"run {name!r} is being deleted; wait until `bapo runs` no longer lists it, or give "
            "bapo_run another name"
        )
    workflow_to_replace(context, jobs, state)
    position = f"at step {state.current_step} of {state.config.steps}"
    if state.status == "finished":
        context.log(
            f"run {name} is finished, so that nothing is trained; to train anew, leave bapo_run "
            "empty, or give it another name"
        )
    elif state.stopped is not None:
        context.log(
            f"run {name} exists, {position}: it is continued; it was stopped by "
            f"{state.stopped.describe()}"
        )
    else:
        context.log(f"run {name} exists, {position}, and is {state.status}: it is continued")


def workflow_to_replace(
    context: PipelineContext, jobs: TrainerJobs, state: wire.RunState
) -> str | None:
    """Returns the workflow that has ended without ending the run, which may be taken over; or None.

    Raises `BapoError` if another workflow trains the run: two pipelines would replace each other's
    job.
    """
    if state.status not in wire.UNFINISHED_STATUSES or state.workflow in (None, context.workflow):
        return None
    if context.workflow is not None and jobs.backend.has_ended(state.workflow):
        return state.workflow
    raise BapoError(
        f"run {state.name!r} is {state.status}, and workflow {state.workflow} trains it; leave "
        "bapo_run empty for a new run, or give it another name; to continue this run, terminate "
        "that pipeline first, or wait for its end"
    )


def prepare(context: PipelineContext, config: RunConfig) -> str:
    """Stores the prompts and the initial model; returns the `RunCreate` for `open_run` as JSON.

    Raises `BapoError`.
    """
    from services.datasets import DataSources, pin_revisions, prepare_run
    from services.model.resolve import ensure_model
    from services.model.stored import fetch_model, store_model

    for warning in config.warnings():
        context.log(f"note: {warning}")
    config = pin_revisions(config)
    state = none_if_missing(context.buffer.run_state)
    # The path in the configuration may lead elsewhere by now.
    path = config.model.path if state is None else state.config.model.path
    is_stored = path.startswith(MODEL_SCHEME)
    if is_stored:
        model = fetch_model(path, context.store, context.scratch / "tokenizer", weights=False)
    else:
        model = ensure_model(config, context.scratch)
    request = prepare_run(
        config,
        model,
        DataSources(context.scratch / "datasets", lambda: context.store, lambda: context.buffer),
        context.buffer,
        show=lambda dataset: context.log(f"dataset {dataset.name}: {dataset.summary}"),
        existing=state,
    )
    request.config["model"]["path"] = path if is_stored else store_model(context.store, model)
    context.log(f"model {request.config['model']['path']}")
    return request.model_dump_json()


def open_run(context: PipelineContext, jobs: TrainerJobs, request: str) -> RunConfig:
    """Creates the run unless it exists; returns its configuration.

    A run that is created belongs to the workflow of this step from then on; one that was stopped
    belongs to the workflow that takes its turn first.

    Keys that may change while a run lasts (`bapo_core.config.changes.CHANGEABLE`) are changed to
    the values of the request, from the step after the last checkpoint on. Raises `BapoError` when a
    run of this name exists and other keys differ, because its results would be a mixture of two,
    and when another workflow trains it.
    """
    desired = wire.RunCreate.model_validate_json(request)
    desired.workflow = context.workflow
    buffer = context.buffer
    state = none_if_missing(buffer.run_state)
    if state is None:
        state = buffer.create_run(desired)
        context.log(f"run {state.name} is created")
    # Another pipeline may have created the run, or begun to train it, since `check_run`.
    instead_of = workflow_to_replace(context, jobs, state)
    # Validation adds the keys that are newer than the stored configuration.
    config = state.config
    stored, wanted = flatten(config.model_dump(mode="json")), flatten(desired.config)
    different = {
        key: wanted.get(key)
        for key in (*wanted, *(stored.keys() - wanted.keys()))
        if stored.get(key) != wanted.get(key) and not key.startswith("trainer.")
    }
    fixed = dict.fromkeys(key.partition(".")[0] for key in different if not may_change(key))
    if fixed:
        raise BapoError(
            f"run {state.name!r} exists with another configuration ({', '.join(fixed)} "
            "differ); continue it with its own configuration, in which only "
            f"{', '.join(CHANGEABLE)} may change, or leave bapo_run empty for a new run, or give "
            "it another name"
        )
    if different:
        state = buffer.change_config(
            different, by=context.name, workflow=context.workflow, instead_of=instead_of
        )
        change = state.changes[-1]
        context.log(f"from step {change.first_step} on: {change.describe()}")
    return state.config


def open_fork(
    context: PipelineContext, jobs: TrainerJobs, fork_of: str, request: wire.ForkRequest
) -> RunConfig:
    """Makes a fork of run `fork_of` unless it exists; returns its configuration.

    The fork has the prompts and the model of that run, so that nothing is stored. A step that is
    repeated, and a pipeline that is started again with the same parameters, gets the same fork.

    Raises `ConfigError` if there is no such run, if its model is not in the object store, and for
    what the buffer service refuses, and `BapoError` if another workflow trains the fork.
    """
    parent = context.buffer.of_run(fork_of)
    try:
        path = parent.run_state().config.model.path
        if not path.startswith(MODEL_SCHEME):
            raise ConfigError(
                f"fork_of={fork_of}: no pipeline made this run, because its model {path} is not in "
                "the object store, where the pods look for it; fork it with `bapo fork`"
            )
        state = parent.fork_run(request.model_copy(update={"workflow": context.workflow}))
    except ServiceError as error:
        if error.status not in (400, 403, 404, 409, 422):
            raise
        raise ConfigError(f"fork_of={fork_of}, fork_step={request.step}: {error.detail}") from error
    # Another pipeline may have made the fork since `check_run`.
    workflow_to_replace(context, jobs, state)
    origin = state.forked_from
    assert origin is not None
    context.log(f"run {state.name} is a fork of {origin.describe()}")
    if origin.checkpoint < origin.step == state.current_step:
        context.log(
            f"step {origin.step} has no checkpoint: steps {origin.checkpoint + 1} to {origin.step} "
            "are trained again first, on their recorded batches"
        )
    for change in state.changes:
        context.log(f"from step {change.first_step} on: {change.describe()}")
    for warning in state.config.warnings():
        context.log(f"note: {warning}")
    return state.config


def describe_config(config: RunConfig) -> str:
    """Returns the whole configuration of a run as Markdown, which Kubeflow shows and compares."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return f"# Configuration of {config.name}\n\n```yaml\n{text}```\n"


def segment_end(context: PipelineContext, segment: int, segments: int) -> int:
    """Returns the last training step of a segment, from 1 to `segments`."""
    state = context.buffer.run_state()
    past = 0 if state.forked_from is None else state.forked_from.step
    return segment_ends(state.history, segments, past)[segment - 1]


def segment_ends(configs: ConfigHistory, segments: int, past: int = 0) -> list[int]:
    """Returns the last training step of each segment.

    past: the last step that a fork shares with its run. The segments of a fork are of its own steps
    alone: no job and no replica would work for one that ends in the past.

    Each segment ends at the first step with a checkpoint that is not before its share of the steps,
    and the last one at the last step of the run. In a run with fewer checkpoints than segments,
    several segments end at the same step. Raises `BapoError` when `segments` is less than 1.
    """
    if segments < 1:
        raise BapoError(f"the pipeline has {segments} segments; compile it with at least 1")
    steps = configs.current.steps
    checkpoints = [step for step in range(1, steps + 1) if configs.at(step).checkpoints_after(step)]
    if steps not in checkpoints:
        checkpoints.append(steps)  # the run was shortened to the checkpoint that it was at
    return [
        next(step for step in checkpoints if (step - past) * segments >= segment * (steps - past))
        for segment in range(1, segments + 1)
    ]


def take_turn(context: PipelineContext, jobs: TrainerJobs) -> None:
    """Waits until the run is the one that the rollout replicas work for.

    A step whose turn is granted has it until the run ends, so that steps may repeat this. Raises
    `ServiceError` when the run was stopped, unless the step may reopen it, and `BapoError` when
    another workflow trains it.
    """
    buffer, lines = context.buffer, WaitLog(context.log)
    state = buffer.run_state()
    # A step that fails stops the run of its own workflow, which its automatic retry may continue.
    may_reopen = context.may_reopen or (
        state.stopped is not None and state.stopped.by == context.name
    )
    instead_of = workflow_to_replace(context, jobs, state)
    while True:
        turn = buffer.take_turn(reopen=may_reopen, workflow=context.workflow, instead_of=instead_of)
        if turn.granted:
            return
        may_reopen = False  # from here on, a `bapo stop` is meant for this step
        lines.say(
            f"waiting: run {turn.in_front} is in front, of {turn.steps} steps",
            f"; it is at step {turn.current_step}",
        )
        time.sleep(POLL_INTERVAL_S)


def own_run(context: PipelineContext) -> wire.RunState:
    """Returns the run's state. Raises `BapoError` once it was stopped or has failed, and when
    another workflow has taken it over."""
    state = context.buffer.run_state()
    if state.status in ("stopped", "failed"):
        by = f" by {state.stopped.describe()}" if state.stopped is not None else ""
        ended = f"was stopped meanwhile{by}" if state.status == "stopped" else "failed meanwhile"
        raise BapoError(
            f"run {state.name!r} {ended}; start the pipeline with bapo_run={state.name} again to "
            "continue it"
        )
    if state.workflow is not None and not context.owns(state) and state.status != "finished":
        raise BapoError(
            f"workflow {state.workflow} has taken run {state.name!r} over and trains it now"
        )
    return state


class RunCheck:
    """Checks, while a step waits, whether what it waits for can still come."""

    def __init__(self, context: PipelineContext) -> None:
        self._context = context
        self._next_at = time.monotonic() + BUCKET_CHECK_INTERVAL_S

    def __call__(self) -> wire.RunState:
        """Returns the run's state.

        Raises `BapoError` as `own_run` does, and `ObjectStoreError` when the bucket is gone: no
        rollouts can be stored then, so that a trainer would wait for them for ever.
        """
        state = own_run(self._context)
        if time.monotonic() >= self._next_at:
            try:
                self._context.store.check()
            except TransientError as error:
                self._context.log(str(error))
            self._next_at = time.monotonic() + BUCKET_CHECK_INTERVAL_S
        return state


# ---- a segment ----------------------------------------------------------------------------------


def train(
    context: PipelineContext,
    jobs: TrainerJobs,
    until: int,
    resources: Resources,
    *,
    start_within_s: float = 3600.0,
) -> None:
    """Runs the training job until step `until` is trained. The job itself trains all segments.

    Raises `BapoError` when the job fails, dies again and again, has not started within
    `start_within_s`, or trains nothing for `job_watch.STALLED_WITHIN_S`, and when the bucket is
    gone.
    """
    buffer = context.buffer
    config = buffer.run_state().config
    if is_trained(buffer, config, until):
        context.log(f"step {until} is trained already")
        return
    take_turn(context, jobs)
    # Read anew: the turn of a run that was stopped begins at its last checkpoint.
    context.log(f"training from step {buffer.run_state().current_step + 1} to {until}")
    job = TrainingJob(
        buffer.run,
        jobs.deployment,
        resources,
        processes=config.trainer.processes,
        owner=jobs.owner,
        workflow=context.workflow,
    )
    watch = JobWatch(
        jobs.backend,
        job,
        buffer,
        context.log,
        start_within_s,
        check_run=RunCheck(context),
        describe_rollouts=partial(_describe_replicas, buffer),
    )
    with mirror_to_mlflow(config, buffer):
        watch.ensure_job()
        if jobs.deployment.queue:
            _require_queue(jobs, job.name, context.log)
        watch.follow_until(lambda: is_trained(buffer, config, until))


def _require_queue(jobs: TrainerJobs, name: str, log: Callable[[str], None]) -> None:
    """Raises `BapoError`, and deletes the job, if Kueue does not manage it.

    Such a job would start at once, whatever the quota.
    """
    deadline = time.monotonic() + KUEUE_TIMEOUT_S
    while not jobs.backend.is_queued(name):
        if time.monotonic() > deadline:
            remove_job(jobs.backend, name, log=log)
            raise BapoError(
                f"the chart's kueue.queue is {jobs.deployment.queue!r}, but Kueue does not manage "
                f"job {name}: add {KUEUE_FRAMEWORKS[jobs.deployment.job_kind]} to "
                "integrations.frameworks of Kueue's configuration (PyTorchJobs are no default from "
                "0.19 on), or clear kueue.queue"
            )
        time.sleep(POLL_INTERVAL_S)


def is_trained(buffer: BufferClient, config: RunConfig, until: int) -> bool:
    """Returns whether step `until` is committed and in a checkpoint, and its weights published."""
    newest = buffer.target_weights().newest
    return (
        buffer.run_state().current_step >= until
        and any(checkpoint.step >= until for checkpoint in buffer.checkpoints())
        and newest is not None
        and newest.number >= version_after(config, until)
    )


def version_after(config: RunConfig, until: int) -> int:
    """Returns the version that generates the rollouts of step `until + 1`, or the final version."""
    return config.schedule.policy_version(until + 1) if until < config.steps else until + 1


def find_version(buffer: BufferClient, version: int) -> wire.StoredVersion | None:
    """Returns a published version of the weights, or None."""
    return none_if_missing(lambda: buffer.weights(version))


def sync(
    context: PipelineContext, jobs: TrainerJobs, until: int, *, within_s: float = 3600.0
) -> int:
    """Waits until every replica serves the weights published after step `until`, or later ones.

    Returns the oldest version that a replica serves. Raises `BapoError` when the run is stopped or
    fails, or after `within_s`.
    """
    take_turn(context, jobs)
    buffer = context.buffer
    config = buffer.run_state().config
    target = version_after(config, until)

    def served_version() -> int | None:
        if buffer.run_state().status == "finished":
            return target  # the replicas serve other runs by now
        return _oldest_served(buffer, target)

    version = _wait_for(
        context,
        served_version,
        f"every replica serving version {target} or a later one",
        within_s,
        f"GET /v1/runs/{config.name}/replicas shows their state; do the pods of the chart's "
        "rollout StatefulSet run?",
        lambda: _describe_replicas(buffer),
    )
    context.log(f"step {until} is in a checkpoint, and every replica serves version {version}")
    return version


def _oldest_served(buffer: BufferClient, at_least: int) -> int | None:
    """Returns the oldest version among the replicas, or None while one serves an earlier version
    than `at_least`, or weights that the run does not have."""
    replicas = [replica for replica in buffer.replicas() if replica.silent_s < REPLICA_GONE_AFTER_S]
    digests = {replica.loaded_version: replica.manifest_digest for replica in replicas}
    if not digests or min(digests) < at_least:
        return None
    for version, digest in digests.items():
        stored = find_version(buffer, version)
        # A run that was rewound to a checkpoint makes the versions after it again.
        if stored is None or stored.manifest_digest != digest:
            return None
    return min(digests)


def _describe_replicas(buffer: BufferClient) -> str:
    """Returns what each replica serves, and the errors of those that fail."""
    replicas = [
        f"{replica.name} serves version {replica.loaded_version}"
        if replica.state != "failing"
        else f"{replica.name} is failing: {replica.detail}"
        for replica in buffer.replicas()
        if replica.silent_s < REPLICA_GONE_AFTER_S
    ]
    return ", ".join(replicas) or "no replica has reported"


def _wait_for(
    context: PipelineContext,
    result: Callable[[], Result | None],
    what: str,
    within_s: float,
    hint: str,
    progress: Callable[[], str],
) -> Result:
    """Calls `result` until it is not None, and says every minute what it waits for.

    progress: returns the present state of what is waited for. Raises `BapoError` when the run was
    stopped, has failed or was taken over, when the bucket is gone, and after `within_s` seconds.
    """
    deadline = time.monotonic() + within_s
    lines = WaitLog(context.log)
    check_run = RunCheck(context)
    while (value := result()) is None:
        check_run()
        detail = progress()
        if time.monotonic() > deadline:
            raise BapoError(f"waited {within_s:.0f} s for {what} ({detail}); {hint}")
        lines.say(f"waiting for {what}, for up to {within_s / 60:.0f} min", f": {detail}")
        time.sleep(POLL_INTERVAL_S)
    return value


@dataclass(frozen=True, slots=True)
class RunReport:
    """Artifacts that report a run so far: an HTML page, the metrics, and a summary in Markdown."""

    page: str
    metrics: dict[str, float]
    markdown: str

    def write(self, page: str, markdown: str) -> None:
        """Writes the page and the summary to the paths of a step's artifacts."""
        Path(page).write_text(self.page)
        Path(markdown).write_text(self.markdown)


def write_metrics(artifact: Any, metrics: Mapping[str, float]) -> None:
    """Logs metrics to an artifact of Kubeflow, and writes them to its file.

    Kubeflow's pages compare what is logged. They report an error for an artifact without a file.
    """
    for name, value in metrics.items():
        artifact.log_metric(name, value)
    Path(artifact.path).write_text(json.dumps(dict(metrics), indent=2))


def report(context: PipelineContext, until: int | None = None) -> RunReport:
    """Reports the run so far, once its initial weights are evaluated.

    until: last step that the metrics cover; None for the last one. The job trains on while the
    steps of the pipeline run, so that the end of a segment may be past when it is reported.
    """
    from services.report.html import write_report
    from services.report.summary import read_history, summarise

    _wait_for(
        context,
        lambda: context.buffer.evaluations() or None,
        *("the first evaluation", 3600.0, "see the collector's log"),
        lambda: _describe_replicas(context.buffer),
    )
    history = read_history(context.buffer)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "report.html"
        write_report(history, summarise(history), path)
        page = path.read_text()
    metrics = report_metrics(history, until)
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value:g} |" for name, value in metrics.items())
    run = history.state.name
    title = f"# {run}, step {metrics['step']:g} of {history.config.steps}"
    table = f"| | |\n| --- | --- |\n{rows}\n"
    return RunReport(page, metrics, f"{title}\n\n{table}\n{dashboard_link(context, run)}\n")


def report_metrics(history: RunHistory, until: int | None) -> dict[str, float]:
    """Returns the metrics of a run after step `until`, or after its last step if `until` is None.

    `seconds` is the time since the first commit; it includes the pauses between attempts.
    """
    steps = [step for step in history.steps if until is None or step.step <= until]
    step = steps[-1]
    # Version v is the weights after v - 1 steps.
    evaluated = [
        (evaluation, unlocked)
        for evaluation, unlocked in zip(
            history.evaluations, history.unlocked_over_time, strict=True
        )
        if until is None or evaluation.version <= until + 1
    ] or [(history.evaluations[0], history.unlocked_over_time[0])]
    evaluation, unlocked = evaluated[-1]
    metrics = {
        "step": float(step.step),
        "rollouts": float(sum(step.rollouts for step in steps)),
        "reward": step.mean_reward,
        "held_out_accuracy": evaluation.mean_accuracy,
        "held_out_reward": evaluation.mean_reward,
        "held_out_accuracy_initially": history.evaluations[0].mean_accuracy,
        "unlocked_fraction": unlocked,
        "seconds": (step.committed_at - steps[0].committed_at).total_seconds(),
    }
    return metrics | {
        name: step.metrics[name] for name in ("loss", "response_length") if name in step.metrics
    }


def dashboard_link(context: PipelineContext, run: str) -> str:
    """Returns the Markdown that leads to the run's page of the dashboard."""
    if context.dashboard_url:
        return f"[The run's page of the dashboard]({context.dashboard_url}/#/runs/{run})"
    address = urlsplit(context.buffer_url)
    service, port = (address.hostname or "").split(".")[0], address.port
    return (
        f"The run's page of the dashboard: run `kubectl port-forward service/{service} {port}` in "
        f"the namespace of the release, and open <http://127.0.0.1:{port}/#/runs/{run}>"
    )


# ---- after the training -------------------------------------------------------------------------


def final_evaluations(buffer: BufferClient, config: RunConfig) -> list[wire.EvaluationSetView]:
    """Returns the evaluation sets, each with the evaluation of the final weights alone.

    Returns none as long as the evaluation of one of them is missing.
    """
    sets = buffer.evaluation_sets()
    for evaluation_set in sets:
        evaluation_set.evaluations = [
            evaluation
            for evaluation in evaluation_set.evaluations
            if evaluation.version == config.steps + 1
        ]
    return sets if all(evaluation_set.evaluations for evaluation_set in sets) else []


def evaluate(
    context: PipelineContext, jobs: TrainerJobs, *, within_s: float = 3600.0
) -> dict[str, float]:
    """Waits for the evaluations of the final weights.

    Returns their held-out accuracy, the number of prompts for each number of correct responses, and
    the accuracy on each set if there are several.
    """
    take_turn(context, jobs)
    config = context.buffer.run_state().config
    sets = _wait_for(
        context,
        lambda: final_evaluations(context.buffer, config) or None,
        "the evaluation of the final weights",
        within_s,
        "see the collector's log",
        lambda: _describe_replicas(context.buffer),
    )
    accuracies = {each.name: each.evaluations[0].mean_accuracy for each in sets}
    (evaluation,) = next(each.evaluations for each in sets if each.primary)
    size = len(evaluation.bins) - 1
    metrics = {
        "held_out_accuracy": evaluation.mean_accuracy,
        "held_out_reward": evaluation.mean_reward,
    }
    metrics |= {f"prompts_{k}_of_{size}": float(count) for k, count in enumerate(evaluation.bins)}
    if len(sets) > 1:
        metrics |= {f"accuracy_on_{name}": accuracy for name, accuracy in accuracies.items()}
    for name, accuracy in accuracies.items():
        context.log(f"held-out accuracy on {name} {accuracy:.3f}")
    return metrics


def export(context: PipelineContext, directory: Path) -> dict[str, str]:
    """Downloads the final weights as a Hugging Face directory; returns where they are stored.

    Raises `BapoError` when the run is not finished.
    """
    config = context.buffer.run_state().config
    stored = find_version(context.buffer, config.steps + 1)
    if stored is None:
        raise BapoError(f"run {config.name!r} has no final weights yet; it is not finished")
    context.store.get_directory(stored.uri, stored.manifest_digest, directory)
    context.log(f"model in {directory}, {stored.uri} in the object store")
    return {"run": config.name, "version": str(stored.number), "uri": stored.uri}


def clean_up(context: PipelineContext, jobs: TrainerJobs) -> str:
    """Deletes the job, and marks the run as finished or stops it; returns the run's status.

    A run is finished when its final weights are trained and evaluated on every set. One that is
    stopped can be continued by the same pipeline. A job and a run of another workflow are left as
    they are: the pipeline failed because it did not get the run.
    """
    buffer = context.buffer
    if not _may_exist(context):
        return "absent"
    remove_job(jobs.backend, jobs.job_name(buffer.run), context.workflow, log=context.log)
    state = none_if_missing(buffer.run_state)
    if state is None:
        context.log("no run was created")
        return "absent"
    config = state.config
    may_finish = context.owns(state) and state.status in (*wire.OPEN_STATUSES, "finished")
    is_complete = final_evaluations(buffer, config) and is_trained(buffer, config, config.steps)
    if may_finish and is_complete:
        buffer.attempt = state.attempt
        buffer.set_status("finished")
        update_mlflow(config, buffer)
        context.log(f"run {state.name} is finished")
        return "finished"
    stop_run(context, "its pipeline ended before the run was trained and evaluated")
    return buffer.run_state().status


@dataclass(frozen=True, slots=True)
class Orphans:
    """Jobs and runs that no pipeline looks after."""

    jobs: dict[str, str]
    """Run of each job, keyed by the job's name."""
    workflows: dict[str, str | None]
    """Workflow of each job, by the job's name."""
    runs: dict[str, str | None]
    """Runs that keep the runs after them waiting, each with its workflow, which has ended; None for
    a run of an earlier version, whose job's workflow has ended."""


def find_orphans(buffer: BufferClient, backend: TrainerBackend) -> Orphans:
    """Finds the jobs and the runs whose pipeline has finished or was deleted.

    A job is an orphan, too, when its run is not running, paused or queued. A run is not an orphan
    because its job is one: another pipeline may have taken the run over since.
    """
    # The jobs are listed first: a run whose job is younger than this list must not lose it.
    found = backend.jobs()
    active = {run.name: run for run in buffer.runs() if run.status in wire.OPEN_STATUSES}
    jobs = {
        name: run for name, run in found.items() if run not in active or backend.abandoned(name)
    }
    abandoned = set(jobs.values())
    runs = {
        name: run.workflow
        for name, run in active.items()
        if (name in abandoned if run.workflow is None else backend.has_ended(run.workflow))
    }
    states = {name: backend.state(name) for name in jobs}
    workflows = {name: state.workflow if state else None for name, state in states.items()}
    return Orphans(jobs, workflows, runs)


def remove_orphans(
    buffer: BufferClient,
    backend: TrainerBackend,
    orphans: Orphans,
    log: Callable[[str], None],
) -> None:
    """Deletes orphaned jobs and stops the orphaned runs, so that replicas serve other runs."""
    for name in orphans.jobs:
        # Another pipeline may have replaced the job since it was found.
        remove_job(backend, name, orphans.workflows[name], log=log)
    for run, workflow in orphans.runs.items():
        buffer.run = run
        reason = f"its workflow {workflow or 'of its job'} has ended without stopping it"
        try:
            buffer.stop(by="the reaper", reason=reason, workflow=workflow)
        except ServiceError as error:
            if error.status not in (404, 409):
                raise  # it was deleted, or has another workflow since
