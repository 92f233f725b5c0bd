"""Bodies of the pipeline's components, one function for each.

Each may be repeated at any time: the progress of a run is the buffer service's state alone, and no
component passes it on.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from pipelines.backends import TrainerBackend, ensure_job, remove_job
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
from services.buffer.api import wire
from services.buffer.api.client import BufferClient, none_if_missing
from services.common import layout
from services.common.objectstore import S3_SCHEME, FileContent, ObjectStore
from services.common.process import end_with_parent, stop_on_signals
from services.exporters.mlflow import mirror_to_mlflow, update_mlflow

POLL_INTERVAL_S = 2.0
REPLICA_GONE_AFTER_S = 30.0
"""Age of a replica's last heartbeat, in seconds, beyond which the pipeline does not wait for it.
It is longer than `wire.HEARTBEAT_TIMEOUT_S`: a replica that restarts comes back within it."""
KUEUE_FRAMEWORKS: dict[JobKindName, str] = {
    "PyTorchJob": "kubeflow.org/pytorchjob",
    "TrainJob": "trainer.kubeflow.org/trainjob",
}
"""Name of each kind of job among `integrations.frameworks` of Kueue's configuration."""
KUEUE_TIMEOUT_S = 30.0
"""Seconds within which Kueue notices a job that it manages."""
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
    def from_environment(cls, run: str) -> PipelineContext:
        """Connects to the services that the connection ConfigMap and the Secrets name.

        Raises `ConfigError` when a variable is missing or invalid.
        """
        settings = StepSettings.load()
        workflow = None
        if settings.workflow and LocalJobsSettings.load().local_jobs is None:
            from pipelines.cluster import current_namespace

            workflow = f"{current_namespace()}/{settings.workflow}"
        return cls(
            BufferClient(settings.buffer_url, settings.token.get_secret_value(), run=run),
            ObjectStore(settings.s3),
            settings.scratch,
            lambda line: print(line, flush=True),
            workflow=workflow,
            may_reopen=RetrySettings().kfp_retry_index == 0,
            buffer_url=settings.buffer_url,
            dashboard_url=settings.dashboard_url.rstrip("/"),
        )


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
        from pipelines.cluster import current_namespace
        from pipelines.kubeflow import KubeflowBackend

        namespace = current_namespace()
        deployment = Deployment.from_settings(DeploymentSettings.load(), namespace)
        backend = KubeflowBackend(namespace, deployment.release)
        workflow = StepSettings.load().workflow
        return cls(
            backend, deployment, backend.owner(workflow), partial(backend.is_terminating, workflow)
        )


@contextmanager
def pipeline_step(run: str) -> Iterator[tuple[PipelineContext, TrainerJobs]]:
    """Yields the context of a step, and ends the step with one line when it fails.

    A `BapoError` becomes the last line of the step's log. When the pipeline is cancelled, Kubeflow
    sends SIGTERM to the step, which then deletes the job and stops the run. The clients for that
    are made first, because Kubernetes kills the step soon afterwards.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    local_jobs = LocalJobsSettings.load().local_jobs
    try:
        context, jobs = PipelineContext.from_environment(run), TrainerJobs.from_environment()
        if local_jobs is not None:
            end_with_parent()  # `bapo pipeline run-local` cancels the run itself
        else:
            stop_on_signals()
        try:
            yield context, jobs
        except SystemExit:
            if local_jobs is None and jobs.is_cancelled():
                cancel(context, jobs)
            raise
    except BapoError as error:
        if local_jobs is not None:
            local_jobs.mkdir(parents=True, exist_ok=True)
            (local_jobs / LAST_ERROR).write_text(str(error))
        raise SystemExit(f"error: {error}") from None


def cancel(context: PipelineContext, jobs: TrainerJobs) -> None:
    """Deletes the job and stops the run, whose other processes then leave it."""
    jobs.backend.delete(jobs.job_name(context.buffer.run))
    state = none_if_missing(context.buffer.stop)
    if state is None:
        context.log("cancelled before the run was created")
        return
    if state.status == "finished":
        context.log(f"run {state.name} is finished")
        return
    context.log(
        f"run {state.name} is {state.status} at step {state.current_step}; start the pipeline with "
        "the same run and configuration to continue it"
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
    """Returns the ending of a data file's name, by what the file begins with."""
    if beginning.startswith(b"PAR1"):
        return ".parquet"
    return ".json" if beginning.lstrip().startswith(b"[") else ".jsonl"


def import_data(context: PipelineContext, file: Path) -> str:
    """Stores a data set that Kubeflow imported, and returns its address, as of `task.train_path`.

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


def prepare(context: PipelineContext, config: RunConfig) -> str:
    """Stores the prompts and the initial model; returns the `RunCreate` for `open_run` as JSON.

    It is text, because KFP turns every number of a structured parameter into a float and refuses
    nulls when it runs locally. Raises `BapoError`.
    """
    from services.common.layout import MODEL_SCHEME
    from services.datasets import (
        DataSources,
        keep_prompts,
        limit_lengths,
        load_datasets,
        pin_revisions,
        store_dataset,
    )
    from services.model.resolve import ensure_model
    from services.model.stored import fetch_model, store_model
    from services.model.vision import check_model

    for warning in config.warnings():
        context.log(f"note: {warning}")
    config = pin_revisions(config)
    sources = DataSources(
        context.scratch / "datasets", lambda: context.store, lambda: context.buffer
    )
    datasets = load_datasets(config, sources)
    state = none_if_missing(context.buffer.run_state)
    # That of the configuration may lead elsewhere by now.
    path = config.model.path if state is None else state.config.model.path
    is_stored = path.startswith(MODEL_SCHEME)
    if is_stored:
        model = fetch_model(path, context.store, context.scratch / "tokenizer", weights=False)
    else:
        model = ensure_model(config, context.scratch)
    if datasets.train.images is not None:
        check_model(model, config.rollout.engine)
    # A run that exists has its prompts, also one of an earlier version that did not check them.
    if state is None or config.task.drop_long_prompts:
        datasets = limit_lengths(config, datasets, model)
    if state is not None:
        config = keep_prompts(config, state, datasets)
    for dataset in datasets.all:
        store_dataset(context.buffer, dataset)
        context.log(f"dataset {dataset.name}: {dataset.summary}")
    if not is_stored:
        path = store_model(context.store, model)
    context.log(f"model {path}")
    stored = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    return datasets.run_request(stored).model_dump_json()


def open_run(context: PipelineContext, request: str, segments: int) -> list[int]:
    """Creates the run unless it exists; returns the last training step of each segment.

    Raises `BapoError` when a run of this name exists with another configuration, because its
    results would be a mixture of two.
    """
    desired = wire.RunCreate.model_validate_json(request)
    buffer = context.buffer
    state = none_if_missing(buffer.run_state)
    if state is None:
        state = buffer.create_run(desired)
        context.log(f"run {state.name} is created")
    # Validation adds the keys that are newer than the stored configuration.
    config = state.config
    stored = config.model_dump(mode="json")
    different = [key for key, value in desired.config.items() if stored.get(key) != value]
    if set(different) - {"trainer"}:
        raise BapoError(
            f"run {state.name!r} exists with another configuration ({', '.join(different)} "
            "differ); continue it with its own configuration, or choose another name"
        )
    ends = segment_ends(config, segments)
    context.log(
        f"run {state.name} is at step {state.current_step} of {config.steps}; its segments end at "
        f"steps {', '.join(map(str, ends))}"
    )
    return ends


def segment_ends(config: RunConfig, segments: int) -> list[int]:
    """Returns the last training step of each segment.

    Each segment ends at the first step with a checkpoint that is not before its share of the steps,
    and the last one at the last step of the run. In a run with fewer checkpoints than segments,
    several segments end at the same step. Raises `BapoError` when `segments` is less than 1.
    """
    if segments < 1:
        raise BapoError(f"the pipeline has {segments} segments; compile it with at least 1")
    checkpoints = [step for step in range(1, config.steps + 1) if config.checkpoints_after(step)]
    return [
        next(step for step in checkpoints if step * segments >= segment * config.steps)
        for segment in range(1, segments + 1)
    ]


def take_turn(context: PipelineContext) -> None:
    """Waits until the run is the one that the rollout replicas work for.

    A step whose turn is granted has it until the run ends, so that steps may repeat this. Raises
    `ServiceError` when the run was stopped, unless the step may reopen it.
    """
    buffer, may_reopen, logged = context.buffer, context.may_reopen, ""
    while True:
        turn = buffer.take_turn(reopen=may_reopen, workflow=context.workflow)
        if turn.granted:
            return
        may_reopen = False  # from here on, a `bapo stop` is meant for this step
        line = f"waiting: run {turn.in_front} is in front, of {turn.steps} steps"
        if line != logged:
            context.log(f"{line}; it is at step {turn.current_step}")
            logged = line
        time.sleep(POLL_INTERVAL_S)


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

    Raises `BapoError` when the job fails, is deleted, or has not started within `start_within_s`.
    """
    run = context.buffer.run
    state = context.buffer.run_state()
    config = state.config
    if is_trained(context.buffer, config, until):
        context.log(f"step {until} is trained already")
        return
    take_turn(context)
    context.log(f"training from step {state.current_step + 1} to {until}")
    job = TrainingJob(
        run,
        jobs.deployment,
        resources,
        processes=config.trainer.processes,
        owner=jobs.owner,
    )
    with mirror_to_mlflow(config, context.buffer):
        ensure_job(jobs.backend, job)
        if jobs.deployment.queue:
            _require_queue(jobs, job.name)
        _log_until_trained(context, jobs.backend, job.name, config, until, start_within_s)


def _require_queue(jobs: TrainerJobs, name: str) -> None:
    """Raises `BapoError`, and deletes the job, if Kueue does not manage it.

    Such a job would start at once, whatever the quota.
    """
    deadline = time.monotonic() + KUEUE_TIMEOUT_S
    while not jobs.backend.is_queued(name):
        if time.monotonic() > deadline:
            remove_job(jobs.backend, name)
            raise BapoError(
                f"the chart's kueue.queue is {jobs.deployment.queue!r}, but Kueue does not manage "
                f"job {name}: add {KUEUE_FRAMEWORKS[jobs.deployment.job_kind]} to "
                "integrations.frameworks of Kueue's configuration (PyTorchJobs are no default from "
                "0.19 on), or clear kueue.queue"
            )
        time.sleep(POLL_INTERVAL_S)


def is_trained(buffer: BufferClient, config: RunConfig, until: int) -> bool:
    """Whether step `until` is committed and in a checkpoint, and the weights after it published."""
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


def _log_until_trained(
    context: PipelineContext,
    backend: TrainerBackend,
    name: str,
    config: RunConfig,
    until: int,
    start_within_s: float,
) -> None:
    """Logs each change of the job's state and each training step until step `until` is trained."""
    logged_step, logged_state = context.buffer.run_state().current_step, ""
    waiting_since = time.monotonic()
    while not is_trained(context.buffer, config, until):
        state = backend.state(name)
        if state is None:
            raise BapoError(
                f"job {name} was deleted while it trained; retry the step to create it again"
            )
        if state.phase == "failed":
            raise BapoError(f"job {name} failed: {state.reason}")
        if state.phase == "succeeded" and not is_trained(context.buffer, config, until):
            raise BapoError(
                f"job {name} succeeded, but run {config.name!r} is at step "
                f"{context.buffer.run_state().current_step}; was the run rewound meanwhile?"
            )
        line = f"job {name} is {state.phase}" + (f": {state.reason}" if state.reason else "")
        if line != logged_state:
            context.log(line)
            logged_state = line
        if state.phase != "waiting":
            waiting_since = time.monotonic()  # a queue may take its nodes back
        elif time.monotonic() - waiting_since > start_within_s:
            raise BapoError(
                f"job {name} has not started within {start_within_s:.0f} s: "
                f"{state.reason or 'Kubernetes gives no reason; does the training operator run?'}"
            )
        logged_step = _log_steps(context, logged_step)
        time.sleep(POLL_INTERVAL_S)
    _log_steps(context, logged_step)


def _log_steps(context: PipelineContext, after: int) -> int:
    """Logs the training steps after step `after`; returns the last one."""
    for step in context.buffer.steps(after=after):
        groups = [
            f"{step.counts.get(key, 0)} {word}"
            for key, word in (
                ("fresh", "fresh"),
                ("reevaluated", "re-evaluated"),
                ("replayed", "replayed"),
            )
        ]
        context.log(f"step {step.step}: reward {step.mean_reward:.3f}, groups {' + '.join(groups)}")
        after = step.step
    return after


def sync(context: PipelineContext, until: int, *, within_s: float = 3600.0) -> int:
    """Waits until every replica serves the weights published after step `until`, or later ones.

    Returns the oldest version that a replica serves. Raises `BapoError` when the run is stopped or
    fails, or after `within_s`.
    """
    take_turn(context)
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


def _wait_for(
    context: PipelineContext,
    result: Callable[[], Result | None],
    what: str,
    within_s: float,
    hint: str,
) -> Result:
    """Calls `result` until it is not None.

    Raises `BapoError` when the run was stopped or has failed, and after `within_s` seconds.
    """
    deadline = time.monotonic() + within_s
    while (value := result()) is None:
        state = context.buffer.run_state()
        if state.status in ("stopped", "failed"):
            ended = "was stopped" if state.status == "stopped" else "failed"
            raise BapoError(
                f"run {state.name!r} {ended} meanwhile; start the pipeline again to continue"
            )
        if time.monotonic() > deadline:
            raise BapoError(f"waited {within_s:.0f} s for {what}; {hint}")
        time.sleep(POLL_INTERVAL_S)
    return value


@dataclass(frozen=True, slots=True)
class RunReport:
    """Artifacts that report a run so far: the HTML page, the metrics, and these as Markdown."""

    page: str
    metrics: dict[str, float]
    markdown: str

    def write(self, page: str, markdown: str) -> None:
        """Writes the page and the summary to the paths of a step's artifacts."""
        Path(page).write_text(self.page)
        Path(markdown).write_text(self.markdown)


def report(context: PipelineContext) -> RunReport:
    """Reports the run so far, once its initial weights are evaluated."""
    from services.report.html import write_report
    from services.report.summary import read_history, summarise

    _wait_for(
        context,
        lambda: context.buffer.evaluations() or None,
        *("the first evaluation", 3600.0, "see the collector's log"),
    )
    history = read_history(context.buffer)
    summary = summarise(history)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "report.html"
        write_report(history, summary, path)
        page = path.read_text()
    initial, final = history.evaluations[0], history.evaluations[-1]
    metrics = {
        "step": float(history.state.current_step),
        "rollouts": float(summary["rollouts"]),
        "held_out_accuracy": final.mean_accuracy,
        "held_out_accuracy_initially": initial.mean_accuracy,
        "unlocked_fraction": summary["unlocked_fraction"],
    }
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value:g} |" for name, value in metrics.items())
    run = history.state.name
    title = f"# {run}, step {history.state.current_step} of {history.config.steps}"
    table = f"| | |\n| --- | --- |\n{rows}\n"
    return RunReport(page, metrics, f"{title}\n\n{table}\n{dashboard_link(context, run)}\n")


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


def evaluate(context: PipelineContext, *, within_s: float = 3600.0) -> dict[str, float]:
    """Waits for the evaluations of the final weights.

    Returns their held-out accuracy, the number of prompts for each number of correct responses, and
    the accuracy on each set if there are several.
    """
    take_turn(context)
    config = context.buffer.run_state().config
    sets = _wait_for(
        context,
        lambda: final_evaluations(context.buffer, config) or None,
        "the evaluation of the final weights",
        within_s,
        "see the collector's log",
    )
    accuracies = {each.name: each.evaluations[0].mean_accuracy for each in sets}
    (evaluation,) = next(each.evaluations for each in sets if each.primary)
    size = len(evaluation.bins) - 1
    metrics = {"held_out_accuracy": evaluation.mean_accuracy}
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


def clean_up(
    context: PipelineContext, jobs: TrainerJobs
) -> Literal["finished", "stopped", "absent"]:
    """Deletes the job, and marks the run as finished or stops it; returns the run's status.

    A run is finished when its final weights are trained and evaluated on every set. One that is
    stopped can be continued by the same pipeline.
    """
    buffer = context.buffer
    remove_job(jobs.backend, jobs.job_name(buffer.run))
    state = none_if_missing(buffer.run_state)
    if state is None:
        context.log("no run was created")
        return "absent"
    config = state.config
    if final_evaluations(buffer, config) and is_trained(buffer, config, config.steps):
        buffer.attempt = state.attempt
        buffer.set_status("finished")
        update_mlflow(config, buffer)
        context.log(f"run {state.name} is finished")
        return "finished"
    cancel(context, jobs)
    return "stopped"


@dataclass(frozen=True, slots=True)
class Orphans:
    """Jobs and runs that no pipeline looks after."""

    jobs: dict[str, str]
    """Run of each job, keyed by the job's name."""
    runs: list[str]
    """Runs without such a job, which keep the runs after them waiting."""


def find_orphans(buffer: BufferClient, backend: TrainerBackend) -> Orphans:
    """Finds the jobs and the runs whose pipeline has finished or was deleted.

    A job is an orphan, too, when its run is not running, paused or queued.
    """
    active = {run.name: run for run in buffer.runs() if run.status in wire.OPEN_STATUSES}
    jobs = {
        name: run
        for name, run in backend.jobs().items()
        if run not in active or backend.abandoned(name)
    }
    runs = [
        name
        for name, run in active.items()
        if name not in jobs.values()
        and run.workflow is not None
        and backend.has_ended(run.workflow)
    ]
    return Orphans(jobs, runs)


def remove_orphans(buffer: BufferClient, backend: TrainerBackend, orphans: Orphans) -> None:
    """Deletes orphaned jobs and stops the orphaned runs, so that replicas serve other runs."""
    for name in orphans.jobs:
        remove_job(backend, name)
    for run in [*orphans.jobs.values(), *orphans.runs]:
        buffer.run = run
        none_if_missing(buffer.stop)
