"""What the pipeline's steps do. Each may be repeated, at any time: what is done is the buffer
service's to say, never the pipeline's.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from bapo_core.config import RunConfig, parse_config
from bapo_core.errors import BapoError
from pipelines.backends import TrainerBackend, ensure, remove
from pipelines.pytorchjob import Deployment, Owner, Resources, build_job, job_name
from pipelines.settings import StepSettings
from services.buffer.api import wire
from services.buffer.api.client import BufferClient, none_if_missing
from services.common.objectstore import ObjectStore
from services.common.process import end_with_parent, stop_on_signals
from services.exporters.mlflow import bring_up_to_date, mirrored

LOOK_EVERY_S = 2.0
SILENT_S = 30.0
"""A replica that has said nothing for so long is not waited for."""
JOBS_HERE = "BAPO_LOCAL_JOBS"
"""The directory of the jobs, where they are processes of this machine."""
LAST_ERROR = "last-error"
"""In that directory: why the last step that failed did."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the steps work with."""

    buffer: BufferClient
    store: ObjectStore
    say: Callable[[str], None]

    @classmethod
    def of(cls, run: str) -> Surroundings:
        """From the environment: the connection ConfigMap and the secrets."""
        settings = StepSettings.load()
        return cls(
            BufferClient(settings.buffer_url, settings.token.get_secret_value(), run=run),
            ObjectStore(settings.s3),
            lambda line: print(line, flush=True),
        )


@dataclass(frozen=True, slots=True)
class Trainers:
    """Where the trainer's job runs, and as part of what."""

    backend: TrainerBackend
    deployment: Deployment
    owner: Owner | None = None
    cancelled: Callable[[], bool] = lambda: True
    """Whether a step that is ended from outside is part of a pipeline that was cancelled, and not
    of one whose node is drained."""

    def job_name(self, run: str) -> str:
        return job_name(self.deployment.release, run)

    @classmethod
    def of_environment(cls) -> Trainers:
        here = os.environ.get(JOBS_HERE)
        if here is not None:
            from pipelines.localjobs import LocalBackend

            return cls(LocalBackend(Path(here)), Deployment.from_environment(os.environ, "local"))
        from pipelines.kubeflow import KubeflowBackend, current_namespace

        namespace = current_namespace()
        deployment = Deployment.from_environment(os.environ, namespace)
        backend = KubeflowBackend(namespace, deployment.release)
        workflow = StepSettings.load().workflow
        return cls(
            backend, deployment, backend.owner(workflow), partial(backend.is_ending, workflow)
        )


@contextmanager
def step(run: str) -> Iterator[tuple[Surroundings, Trainers]]:
    """A step of the pipeline. What goes wrong is one line at the end of its log; a pipeline that is
    cancelled, which ends the step from outside, leaves nothing at work.

    All that this takes is made first: Kubernetes gives a step that is ended little time.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    here = JOBS_HERE in os.environ
    try:
        around, trainers = Surroundings.of(run), Trainers.of_environment()
        if here:
            end_with_parent()  # which cancels what there is to cancel
        else:
            stop_on_signals()
        try:
            yield around, trainers
        except SystemExit:
            if not here and trainers.cancelled():
                cancel(around, trainers)
            raise
    except BapoError as error:
        if here:
            place = Path(os.environ[JOBS_HERE])
            place.mkdir(parents=True, exist_ok=True)
            (place / LAST_ERROR).write_text(str(error))
        raise SystemExit(f"error: {error}") from None


def cancel(around: Surroundings, trainers: Trainers) -> None:
    """Deletes the job and turns the run's other processes away."""
    trainers.backend.delete(trainers.job_name(around.buffer.run))
    state = none_if_missing(around.buffer.stop)
    if state is None:
        around.say("cancelled before there was a run")
        return
    if state.status == "finished":
        around.say(f"run {state.name} is finished")
        return
    around.say(
        f"run {state.name} is {state.status} at step {state.current_step}; start the pipeline with "
        "the same run and configuration to continue it"
    )


# ---- before the training ------------------------------------------------------------------------


def prepare(around: Surroundings, config_text: str, overrides: str) -> str:
    """Stores the prompts and the initial model; what `open_run` wants, a `RunCreate` as JSON.

    As text: KFP makes every number of a parameter a float, and locally refuses nulls.
    """
    from rich.console import Console

    from services.common.layout import MODEL_SCHEME
    from services.datasets import load_datasets
    from services.model.resolve import ensure_model
    from services.model.stored import store_model

    config = read_config(config_text, overrides, around.buffer.run)
    for warning in config.warnings():
        around.say(f"note: {warning}")
    stored = _stored_model(around.buffer)
    train, test = load_datasets(config)
    for dataset in (train, test):
        around.buffer.upload_dataset(dataset.name, dataset.prompts)
        around.say(f"dataset {dataset.name}: {len(dataset.prompts)} prompts")
    path = stored or config.model.path
    if not path.startswith(MODEL_SCHEME):
        home = StepSettings.load().scratch
        path = store_model(around.store, ensure_model(config, home, Console()))
    around.say(f"model {path}")
    request = wire.RunCreate(
        name=config.name,
        config=config.model_dump(mode="json") | {"model": {"path": path}},
        train_dataset=train.name,
        test_dataset=test.name,
    )
    return request.model_dump_json()


def _stored_model(buffer: BufferClient) -> str | None:
    """The initial model of a run that is continued: what a name stands for may have changed."""
    state = none_if_missing(buffer.run_state)
    return None if state is None else state.config.model.path


def read_config(text: str, overrides: str, run: str) -> RunConfig:
    """A configuration as YAML, under overrides (`key=value`, one a line), under the run's name."""
    lines = [line.strip() for line in overrides.splitlines() if line.strip()]
    return parse_config(text, [*lines, f"name={run}"])


def open_run(around: Surroundings, request: str, steps_per_segment: int) -> list[int]:
    """Creates the run, or finds it as it was left; the last step of every segment still to do.

    A `BapoError` if there is a run of this name with another configuration: its results would be a
    mixture of two.
    """
    wanted = wire.RunCreate.model_validate_json(request)
    buffer = around.buffer
    state = none_if_missing(buffer.run_state)
    if state is None:
        state = buffer.create_run(wanted)
        around.say(f"run {state.name} is created")
    # With the keys that a newer version has added.
    config = state.config
    held = config.model_dump(mode="json")
    different = [key for key, value in wanted.config.items() if held.get(key) != value]
    if set(different) - {"trainer"}:
        raise BapoError(
            f"run {state.name!r} exists with another configuration ({', '.join(different)} "
            "differ); continue it with the one it was begun with, or take another name"
        )
    if state.status in ("stopped", "failed"):
        state = buffer.begin_attempt()  # even if only its last evaluation is missing
    left = segments(config, state.current_step, steps_per_segment)
    around.say(f"run {state.name} stands at step {state.current_step} of {config.steps}")
    # The last one is repeated in any case: who knows whether its weights were published. And KFP
    # may make of a loop's results no list if there is only one.
    ends = left or [config.steps]
    return ends if len(ends) > 1 else ends * 2


def segments(config: RunConfig, done: int, steps_per_segment: int) -> list[int]:
    """The last steps of the segments after step `done`, each with a checkpoint: the first one in
    every `steps_per_segment` steps of the run, and the run's last. They do not depend on `done`."""
    if steps_per_segment < 1:
        raise BapoError(f"steps_per_segment is {steps_per_segment}; give at least 1")
    ends: list[int] = []
    last = 0
    for step in range(1, config.steps + 1):
        # A window ends where the next step syncs.
        further = (step + 1) // steps_per_segment > (last + 1) // steps_per_segment
        if config.checkpoints_after(step) and (further or step == config.steps):
            ends.append(step)
            last = step
    if len(ends) > 1 and 2 * (ends[-1] - ends[-2]) <= steps_per_segment:
        del ends[-2]  # what is left at the end is no segment of its own
    return [step for step in ends if step > done]


# ---- a segment ----------------------------------------------------------------------------------


def train(
    around: Surroundings,
    trainers: Trainers,
    until: int,
    resources: Resources,
    *,
    start_within_s: float = 3600.0,
) -> None:
    """Returns once step `until` is trained. The job goes on: it trains all segments."""
    run = around.buffer.run
    config = around.buffer.run_state().config
    if trained(around.buffer, config, until):
        around.say(f"step {until} is trained already")
        return
    around.say(f"from step {around.buffer.run_state().current_step + 1} to {until}")
    job = build_job(
        run,
        trainers.deployment,
        resources,
        processes=config.trainer.processes,
        owner=trainers.owner,
    )
    with mirrored(config, around.buffer):
        ensure(trainers.backend, job)
        _follow(around, trainers.backend, trainers.job_name(run), config, until, start_within_s)


def trained(buffer: BufferClient, config: RunConfig, until: int) -> bool:
    """Whether step `until` is committed and in a checkpoint, and the weights that are wanted after
    it are published: all that the trainer has to do with it."""
    newest = buffer.target_weights().newest
    return (
        buffer.run_state().current_step >= until
        and any(each.step >= until for each in buffer.checkpoints())
        and newest is not None
        and newest.number >= wanted_after(config, until)
    )


def wanted_after(config: RunConfig, until: int) -> int:
    """The version that makes the rollouts of the step after `until`, or is the final one."""
    return config.schedule.policy_version(until + 1) if until < config.steps else until + 1


def published(buffer: BufferClient, version: int) -> wire.StoredVersion | None:
    return none_if_missing(lambda: buffer.weights(version))


def _follow(
    around: Surroundings,
    backend: TrainerBackend,
    name: str,
    config: RunConfig,
    until: int,
    start_within_s: float,
) -> None:
    """Says what the run and its job do until the steps are trained."""
    shown, said = around.buffer.run_state().current_step, ""
    begun = time.monotonic()
    while not trained(around.buffer, config, until):
        state = backend.state(name)
        if state is None:
            raise BapoError(
                f"job {name} was deleted while it trained; retry the step to begin it again"
            )
        if state.phase == "failed":
            raise BapoError(f"job {name} failed: {state.reason}")
        if state.phase == "succeeded" and not trained(around.buffer, config, until):
            raise BapoError(
                f"job {name} succeeded, but run {config.name!r} stands at step "
                f"{around.buffer.run_state().current_step}; was the run rewound meanwhile?"
            )
        words = f"job {name} is {state.phase}" + (f": {state.reason}" if state.reason else "")
        if words != said:
            around.say(words)
            said = words
        if state.phase != "waiting":
            begun = time.monotonic()  # it may have to wait again: a queue took its nodes back
        elif time.monotonic() - begun > start_within_s:
            raise BapoError(
                f"job {name} has not started within {start_within_s:.0f} s: "
                f"{state.reason or 'nothing says why; does the training operator run?'}"
            )
        for step in around.buffer.steps(after=shown):
            around.say(_line(step))
            shown = step.step
        time.sleep(LOOK_EVERY_S)
    for step in around.buffer.steps(after=shown):
        around.say(_line(step))


def _line(step: wire.StepView) -> str:
    sources = ("fresh", "reevaluated", "replayed")
    groups = " + ".join(f"{step.counts.get(source, 0)} {source}" for source in sources)
    return f"step {step.step}: reward {step.r_tot:.3f}, groups {groups}"


def sync(around: Surroundings, until: int, *, within_s: float = 3600.0) -> int:
    """Waits until every replica serves the weights that are wanted after step `until`, or later
    ones; the least of their versions."""
    buffer = around.buffer
    config = buffer.run_state().config
    after = wanted_after(config, until)

    def served() -> int | None:
        status = buffer.run_state().status
        if status == "finished":
            return after  # the replicas have gone on to other runs
        if status == "stopped":
            raise BapoError(
                f"run {config.name!r} was stopped meanwhile; start the pipeline again to continue"
            )
        return _served(buffer, after)

    version = _until(
        served,
        f"every replica serving version {after} or a later one",
        within_s,
        f"GET /v1/runs/{config.name}/replicas shows how they are; is the chart's rollout "
        "StatefulSet up?",
    )
    around.say(f"step {until} is in a checkpoint, and every replica serves version {version}")
    return version


def _served(buffer: BufferClient, at_least: int) -> int | None:
    """The least version of the replicas, once each has one of the run as it is now."""
    replicas = [each for each in buffer.replicas() if each.silent_s < SILENT_S]
    versions = {each.loaded_version: each.manifest_digest for each in replicas}
    if not versions or min(versions) < at_least:
        return None
    for version, digest in versions.items():
        stored = published(buffer, version)
        # A run that was taken back may have had a later version before.
        if stored is None or stored.manifest_digest != digest:
            return None
    return min(versions)


def _until(look: Callable[[], Found | None], what: str, within_s: float, hint: str) -> Found:
    deadline = time.monotonic() + within_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise BapoError(f"{what}: not within {within_s:.0f} s; {hint}")
        time.sleep(LOOK_EVERY_S)
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """Of a run so far: a page with the pictures, and what is worth a table."""

    page: str
    metrics: dict[str, float]
    markdown: str


def report(around: Surroundings) -> Report:
    from services.report.html import write_report
    from services.report.summary import read_history, summarise

    _until(around.buffer.evaluations, "the first evaluation", 3600.0, "see the collector's log")
    history = read_history(around.buffer)
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
    title = f"# {history.state.name}, step {history.state.current_step} of {history.config.steps}"
    return Report(page, metrics, f"{title}\n\n| | |\n| --- | --- |\n{rows}\n")


# ---- after the training -------------------------------------------------------------------------


def evaluate(around: Surroundings, *, within_s: float = 3600.0) -> dict[str, float]:
    """Waits for the final weights on the held-out prompts; their accuracy, by k of G correct."""
    config = around.buffer.run_state().config

    def final() -> wire.Evaluation | None:
        found = {each.version: each for each in around.buffer.evaluations()}
        return found.get(config.steps + 1)

    evaluation = _until(final, "the evaluation of the final weights", within_s, "see the collector")
    around.say(f"held-out accuracy {evaluation.mean_accuracy:.3f}")
    size = len(evaluation.bins) - 1
    bins = {f"prompts_{k}_of_{size}": float(count) for k, count in enumerate(evaluation.bins)}
    return {"held_out_accuracy": evaluation.mean_accuracy, **bins}


def export(around: Surroundings, directory: Path) -> dict[str, str]:
    """The final weights as a Hugging Face directory; where they are in the object store."""
    config = around.buffer.run_state().config
    stored = published(around.buffer, config.steps + 1)
    if stored is None:
        raise BapoError(f"run {config.name!r} has no final weights yet; it is not finished")
    around.store.get_directory(stored.uri, stored.manifest_digest, directory)
    around.say(f"model in {directory}, {stored.uri} in the object store")
    return {"run": config.name, "version": str(stored.number), "uri": stored.uri}


def clean_up(around: Surroundings, trainers: Trainers) -> Literal["finished", "stopped", "absent"]:
    """Deletes the job; the run is finished if everything is there, else stopped: its processes are
    turned away, and the same pipeline continues it."""
    buffer = around.buffer
    remove(trainers.backend, trainers.job_name(buffer.run))
    state = none_if_missing(buffer.run_state)
    if state is None:
        around.say("no run was created")
        return "absent"
    config = state.config
    evaluated = any(each.version == config.steps + 1 for each in buffer.evaluations())
    if evaluated and trained(buffer, config, config.steps):
        buffer.attempt = state.attempt
        buffer.set_status("finished")
        bring_up_to_date(config, buffer)
        around.say(f"run {state.name} is finished")
        return "finished"
    cancel(around, trainers)
    return "stopped"


def orphaned_jobs(buffer: BufferClient, backend: TrainerBackend) -> dict[str, str]:
    """Jobs (name → run) that nobody looks after: their run is not at work, or the pipeline that
    began them is over or gone."""
    at_work = {each.name for each in buffer.runs() if each.status in ("running", "paused")}
    return {
        name: run
        for name, run in backend.jobs().items()
        if run not in at_work or backend.abandoned(name)
    }


def reap(buffer: BufferClient, backend: TrainerBackend, lost: Mapping[str, str]) -> None:
    """Deletes lost jobs; replicas and collectors turn to other runs."""
    for name, run in lost.items():
        remove(backend, name)
        buffer.run = run
        none_if_missing(buffer.stop)
