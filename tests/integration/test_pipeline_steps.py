"""Tests the pipeline's steps on the real buffer service, with a scripted backend for the job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bapo_core.errors import BapoError
from pipelines import steps
from pipelines.backends import JobState
from pipelines.pytorchjob import Resources, job_name
from pipelines.settings import LOCAL_JOBS
from pipelines.steps import PipelineContext, TrainerJobs
from services.buffer.api.client import BufferClient
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.conftest import EASY
from tests.unit.pipelines.test_pytorchjob import DEPLOYMENT

_NUMBERS = count()


@dataclass
class ScriptedBackend:
    """Reports one state of its job after another, and then the last one for ever."""

    script: list[JobState | None] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    without_pipeline: list[str] = field(default_factory=list)

    def create(self, job: dict[str, Any]) -> bool:
        self.created.append(job)
        return True

    def state(self, name: str) -> JobState | None:
        if not self.script or name in self.deleted:
            return None
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def delete(self, name: str) -> None:
        self.deleted.append(name)

    def jobs(self) -> dict[str, str]:
        return {
            job["metadata"]["name"]: job["metadata"]["labels"]["bapo/run"] for job in self.created
        }

    def abandoned(self, name: str) -> bool:
        return name in self.without_pipeline


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "POLL_INTERVAL_S", 0.01)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def log_lines() -> list[str]:
    return []


@pytest.fixture
def context(stack: Endpoints, log_lines: list[str], tmp_path: Path) -> PipelineContext:
    client = BufferClient(stack.buffer_url, stack.token, run=f"stepped-{next(_NUMBERS)}")
    return PipelineContext(client, ObjectStore(stack.object_store), tmp_path, log_lines.append)


CONFIG = f"""
steps: 6
task: {{options: {EASY}, train_prompts: 48, test_prompts: 8}}
rollout: {{prompts_per_step: 16, group_size: 4}}
optimizer: {{minibatch_prompts: 4}}
checkpoint: {{every: 3}}
"""


def open_run(context: PipelineContext, small_model: Any, *overrides: str) -> list[int]:
    lines = "\n".join([f"model.path={small_model}", *overrides])
    return steps.open_run(context, steps.prepare(context, CONFIG, lines), 3)


def train(context: PipelineContext, backend: ScriptedBackend, **options: Any) -> None:
    steps.train(context, TrainerJobs(backend, DEPLOYMENT), 2, Resources(gpus=0), **options)


def test_a_run_is_created_once_and_refuses_another_configuration(
    context: PipelineContext, small_model: Any
) -> None:
    assert open_run(context, small_model) == [2, 6]
    created = context.buffer.run_state()
    assert created.config.model.path.startswith("store://models/")
    assert open_run(context, small_model) == [2, 6]
    assert open_run(context, small_model, "trainer.processes=2") == [2, 6], (
        "trainer.* does not change the results"
    )
    request = steps.prepare(context, CONFIG, f"model.path={small_model}")
    assert steps.open_run(context, request, 100) == [6, 6], "KFP makes no list of one result"
    with pytest.raises(BapoError, match=r"another configuration \(seed differ\)"):
        open_run(context, small_model, "seed=9")
    assert context.buffer.run_state() == created


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([JobState("running"), JobState("failed", "no such model")], "failed: no such model"),
        ([JobState("running"), None], "was deleted while it trained"),
        ([JobState("running"), JobState("succeeded")], "succeeded, but run .* is at step 0"),
        ([JobState("waiting", "Insufficient gpu")], "has not started within 0 s: Insufficient gpu"),
        ([JobState("waiting")], "does the training operator run"),
    ],
)
def test_a_job_that_does_not_train_fails_the_step_with_its_reason(
    context: PipelineContext,
    small_model: Any,
    script: list[JobState | None],
    message: str,
) -> None:
    open_run(context, small_model)
    with pytest.raises(BapoError, match=message):
        train(context, ScriptedBackend(script), start_within_s=0.05)


def test_the_log_has_a_line_for_each_change_of_the_job(
    context: PipelineContext, small_model: Any, log_lines: list[str]
) -> None:
    open_run(context, small_model)
    log_lines.clear()
    waiting = JobState("waiting", "no node")
    script: list[JobState | None] = [waiting, waiting, JobState("running"), JobState("failed", "x")]
    with pytest.raises(BapoError):
        train(context, ScriptedBackend(script))
    name = job_name("bapo", context.buffer.run)
    waits, runs = f"job {name} is waiting: no node", f"job {name} is running"
    assert log_lines == ["training from step 1 to 2", waits, runs]


def test_replicas_that_never_serve_the_weights_fail_the_step(
    context: PipelineContext, small_model: Any
) -> None:
    open_run(context, small_model)
    with pytest.raises(BapoError, match=r"every replica serving version 1 .* rollout StatefulSet"):
        steps.sync(context, 2, within_s=0.05)
    context.buffer.stop()
    with pytest.raises(BapoError, match="was stopped meanwhile"):
        steps.sync(context, 2)


def test_an_export_of_an_unfinished_run_is_refused(
    context: PipelineContext, small_model: Any, tmp_path: Any
) -> None:
    open_run(context, small_model)
    with pytest.raises(BapoError, match="has no final weights yet"):
        steps.export(context, tmp_path)


def test_a_step_whose_node_is_drained_leaves_the_job_running(
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(context, small_model)
    context.buffer.begin_attempt()
    backend = ScriptedBackend([JobState("running")])
    jobs = TrainerJobs(backend, DEPLOYMENT, is_cancelled=lambda: False)
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    monkeypatch.setattr(PipelineContext, "from_environment", lambda _: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: jobs)
    with pytest.raises(SystemExit), steps.pipeline_step(context.buffer.run):
        signal.raise_signal(signal.SIGTERM)
    assert not backend.deleted
    assert context.buffer.run_state().status == "running"


def test_a_run_keeps_the_model_that_it_was_created_with(
    context: PipelineContext, small_model: Any, tmp_path: Any
) -> None:
    """A run keeps its model even where its `model.path` leads to another one later."""
    open_run(context, small_model)
    model = context.buffer.run_state().config.model.path
    assert open_run(context, tmp_path / "another") == [2, 6]
    assert context.buffer.run_state().config.model.path == model


@pytest.mark.parametrize("created", [True, False])
def test_a_cancelled_step_deletes_the_job_and_stops_the_run(
    context: PipelineContext,
    small_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    log_lines: list[str],
    created: bool,
) -> None:
    """Kubeflow may end the pod of any step, also before the run is created."""
    if created:
        open_run(context, small_model)
        context.buffer.begin_attempt()
    backend = ScriptedBackend([JobState("running")])
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    monkeypatch.setattr(PipelineContext, "from_environment", lambda _: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: TrainerJobs(backend, DEPLOYMENT))
    with pytest.raises(SystemExit) as ended, steps.pipeline_step(context.buffer.run):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert backend.deleted == [job_name("bapo", context.buffer.run)]
    if created:
        assert context.buffer.run_state().status == "stopped"
        assert "start the pipeline with the same run" in log_lines[-1]
    else:
        assert log_lines == ["cancelled before the run was created"]


def test_an_error_is_one_line(
    context: PipelineContext, monkeypatch: pytest.MonkeyPatch, small_model: Any
) -> None:
    backend = ScriptedBackend()
    monkeypatch.setattr(PipelineContext, "from_environment", lambda _: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: TrainerJobs(backend, DEPLOYMENT))
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    with (
        pytest.raises(SystemExit) as ended,
        steps.pipeline_step(context.buffer.run) as (step_context, _),
    ):
        steps.prepare(step_context, "steps: many", "")
    assert str(ended.value.code).startswith("error: config: steps: input should be a valid integer")
    assert "\n" not in str(ended.value.code)
    assert not backend.deleted, "an error is no cancellation: Kubeflow retries the step"


def test_cleaning_up_stops_an_unfinished_run_which_can_then_be_continued(
    context: PipelineContext, small_model: Any
) -> None:
    backend = ScriptedBackend([JobState("running")])
    jobs = TrainerJobs(backend, DEPLOYMENT)
    assert steps.clean_up(context, jobs) == "absent"
    open_run(context, small_model)
    context.buffer.begin_attempt()
    assert steps.clean_up(context, jobs) == "stopped"
    assert context.buffer.run_state().status == "stopped"
    open_run(context, small_model)
    assert context.buffer.run_state().status == "running"


def test_orphaned_jobs_are_those_without_an_active_run_or_a_pipeline(
    context: PipelineContext, small_model: Any
) -> None:
    backend = ScriptedBackend([JobState("running")])
    open_run(context, small_model)
    context.buffer.begin_attempt()
    with pytest.raises(BapoError):
        train(context, ScriptedBackend([JobState("failed")]))
    backend.create({"metadata": {"name": "ours", "labels": {"bapo/run": context.buffer.run}}})
    backend.create({"metadata": {"name": "old", "labels": {"bapo/run": "deleted-long-ago"}}})
    orphaned = {"old": "deleted-long-ago"}
    assert steps.orphaned_jobs(context.buffer, backend) == orphaned
    # A pipeline that was killed with its node leaves a run whose status is still `running`.
    backend.without_pipeline.append("ours")
    orphaned["ours"] = context.buffer.run
    assert steps.orphaned_jobs(context.buffer, backend) == orphaned
    steps.delete_orphaned_jobs(context.buffer, backend, orphaned)
    assert sorted(backend.deleted) == ["old", "ours"]
    assert context.buffer.run_state().status == "stopped"
