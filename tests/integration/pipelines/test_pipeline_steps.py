"""Tests the pipeline's steps on the real buffer service, with a scripted backend for the job."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError, ConfigError
from pipelines import job_watch, steps, waiting
from pipelines.backends import JobState
from pipelines.configuration import COUNTDOWN, load_stored_config, read_config, read_fork
from pipelines.settings import LOCAL_JOBS
from pipelines.steps import PipelineContext, TrainerJobs, dashboard_link
from pipelines.training_job import Resources, TrainingJob, job_name
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.pipeline_local import connection_variables
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.common.scopes import Scope
from services.stack.stack import Endpoints
from tests.conftest import EASY
from tests.integration.buffer.test_evaluation_sets import evaluate, sets_config
from tests.integration.buffer.test_forks import Trained
from tests.integration.support.driver import Driver, small_config, stop_open_runs
from tests.unit.pipelines.test_training_job import DEPLOYMENT

_NUMBERS = count()


@dataclass
class ScriptedBackend:
    """Reports one state of its job after another, and then the last one for ever."""

    script: list[JobState | None] = field(default_factory=list)
    created: list[TrainingJob] = field(default_factory=list)
    exists: bool = False
    """Whether the job exists, so that none can be created."""
    deleted: list[str] = field(default_factory=list)
    without_pipeline: list[str] = field(default_factory=list)
    ended_workflows: list[str] = field(default_factory=list)
    kueue: bool = True
    """Whether Kueue manages the jobs."""
    workflow: str | None = None
    """Workflow of the job."""
    spec_hash: str = ""

    def create(self, job: TrainingJob) -> bool:
        if self.exists:
            self.spec_hash = job.spec_hash
            return False
        self.created.append(job)
        return True

    def state(self, name: str) -> JobState | None:
        if not self.script or name in self.deleted:
            return None
        state = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return state and replace(state, workflow=self.workflow, spec_hash=self.spec_hash)

    def delete(self, name: str, workflow: str | None = None) -> None:
        if workflow is None or self.workflow in (None, workflow):
            self.deleted.append(name)

    def jobs(self) -> dict[str, str]:
        return {job.name: job.run for job in self.created}

    def is_queued(self, name: str) -> bool:  # noqa: ARG002
        return self.kueue

    def abandoned(self, name: str) -> bool:
        return name in self.without_pipeline

    def has_ended(self, workflow: str) -> bool:
        return workflow in self.ended_workflows


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(job_watch, "POLL_INTERVAL_S", 0.01)
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
    stop_open_runs(stack.buffer_url, stack.token)
    return make_context(stack, log_lines, tmp_path)


def make_context(stack: Endpoints, log_lines: list[str], scratch: Path) -> PipelineContext:
    client = BufferClient(stack.buffer_url, stack.token, run=f"stepped-{next(_NUMBERS)}")
    return PipelineContext(client, ObjectStore(stack.object_store), scratch, log_lines.append)


CONFIG: dict[str, Any] = {
    "steps": 6,
    "task": {"options": EASY, "train_prompts": 48, "test_prompts": 8},
    "rollout": {"prompts_per_step": 16, "group_size": 4},
    "optimizer": {"minibatch_prompts": 4},
    "checkpoint": {"every": 3},
}


def make_request(context: PipelineContext, small_model: Any, *overrides: str) -> str:
    lines = [f"model.path={small_model}", *overrides]
    return steps.prepare(context, read_config(context.buffer.run, CONFIG, None, lines, {}))


def open_run(context: PipelineContext, small_model: Any, *overrides: str) -> RunConfig:
    return open_run_of(context, jobs_of(), small_model, *overrides)


def open_run_of(
    context: PipelineContext, jobs: TrainerJobs, small_model: Any, *overrides: str
) -> RunConfig:
    return steps.open_run(context, jobs, make_request(context, small_model, *overrides))


def jobs_of(backend: ScriptedBackend | None = None, **options: Any) -> TrainerJobs:
    return TrainerJobs(backend or ScriptedBackend(), DEPLOYMENT, **options)


def train(context: PipelineContext, backend: ScriptedBackend, **options: Any) -> None:
    steps.train(context, TrainerJobs(backend, DEPLOYMENT), 2, Resources(gpus=0), **options)


def test_a_run_is_created_once_and_refuses_another_configuration(
    context: PipelineContext, small_model: Any
) -> None:
    config = open_run(context, small_model)
    created = context.buffer.run_state()
    assert created.config.model.path.startswith("store://models/")
    assert open_run(context, small_model) == config
    assert open_run(context, small_model, "trainer.processes=2") == config, (
        "trainer.* does not change the results"
    )
    assert [steps.segment_end(context, number, 2) for number in (1, 2)] == [5, 6]
    ends = [steps.segment_end(context, number, 4) for number in (1, 2, 3, 4)]
    assert ends == [2, 5, 5, 6], "there are three checkpoints"
    with pytest.raises(BapoError, match=r"another configuration \(seed differ\)"):
        open_run(context, small_model, "seed=9")
    assert context.buffer.run_state() == created


def test_a_pipeline_that_is_started_with_other_values_changes_its_run(
    context: PipelineContext, small_model: Any, log_lines: list[str]
) -> None:
    created = open_run(context, small_model)
    path = created.model.path
    options = ["steps=9", "optimizer.learning_rate=1e-5", "trainer.processes=2"]
    config = open_run(context, path, *options)
    assert (config.steps, config.optimizer.learning_rate) == (9, 1e-5)
    assert any("from step 1 on: optimizer.learning_rate" in line for line in log_lines)
    assert open_run(context, path, *options) == config
    assert len(context.buffer.run_state().changes) == 1
    assert [steps.segment_end(context, number, 3) for number in (1, 2, 3)] == [5, 8, 9]
    with pytest.raises(BapoError, match=r"another configuration \(rollout differ\).* only steps, "):
        open_run(context, path, *options, "rollout.temperature=0.5")


def test_a_pipeline_continues_a_finished_run_that_gets_more_steps(
    context: PipelineContext, small_model: Any, log_lines: list[str]
) -> None:
    path = open_run(context, small_model, "steps=3").model.path
    context.buffer.begin_attempt()
    context.buffer.set_status("finished")
    open_run(context, path, "steps=6")
    state = context.buffer.run_state()
    assert state.stopped is not None
    assert state.stopped.by == context.name
    steps.check_run(context, jobs_of())
    assert "it is continued" in log_lines[-1]
    steps.take_turn(context, jobs_of())
    assert context.buffer.run_state().status == "running"
    assert context.buffer.run_state().steps == 6


def test_a_run_goes_on_without_the_prompts_that_were_too_long(
    context: PipelineContext, small_model: Any, log_lines: list[str]
) -> None:
    """The data are read anew then, and the tokenizer is that of the stored model."""
    several = json.dumps({**EASY, "numbers": [2, 3, 4]})
    options = [f"task.options={several}", "rollout.max_prompt_tokens=10"]
    with pytest.raises(BapoError, match=r"makes: \d of 8 have more tokens"):
        make_request(context, small_model, *options)
    options.append("evaluation.sets={easy: {options: {template: short, numbers: [2]}, prompts: 8}}")
    with pytest.raises(BapoError, match=r"makes: \d+ of 48 have more tokens"):
        make_request(context, small_model, *options)
    options.append("task.drop_long_prompts=true")
    open_run(context, small_model, *options)
    created = context.buffer.run_state()
    assert any("prompts left out as too long" in line for line in log_lines)
    open_run(context, created.config.model.path, *options)
    assert context.buffer.run_state() == created


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([JobState("running"), JobState("failed", "no such model")], "failed: no such model"),
        ([None], "was deleted 4 times while it trained; find out who deletes it"),
        ([JobState("running"), JobState("succeeded")], "succeeded, but run .* is at step 0"),
        ([JobState("waiting", "Insufficient gpu")], "has not started within 0 s: Insufficient gpu"),
        (
            [JobState("waiting", "FailedCreate: exceeded quota: gpus")],
            "exceeded quota: gpus; raise the ResourceQuota of the namespace",
        ),
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


def test_a_queue_that_nobody_manages_fails_the_step_and_leaves_no_job(
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kueue manages no PyTorchJobs by default from 0.19 on: the job would ignore the quota."""
    monkeypatch.setattr(steps, "KUEUE_TIMEOUT_S", 0.05)
    open_run(context, small_model)
    backend = ScriptedBackend([JobState("running")], kueue=False)
    jobs = TrainerJobs(backend, replace(DEPLOYMENT, queue="gpus"))
    with pytest.raises(BapoError, match=r"add kubeflow.org/pytorchjob to integrations\.frameworks"):
        steps.train(context, jobs, 2, Resources(gpus=0))
    assert backend.deleted == [job_name("bapo", context.buffer.run)]


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
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(context, small_model)
    with pytest.raises(BapoError, match=r"every replica serving version 1 .* rollout StatefulSet"):
        steps.sync(context, jobs_of(), 2, within_s=0.05)
    stop = partial(context.buffer.stop, by="alice", reason="its GPUs are needed")
    monkeypatch.setattr(steps, "take_turn", lambda *_: stop())
    stopped = "was stopped meanwhile by alice: its GPUs are needed; start the pipeline with"
    with pytest.raises(BapoError, match=stopped):
        steps.sync(context, jobs_of(), 2)
    with pytest.raises(BapoError, match=stopped):
        steps.evaluate(context, jobs_of())
    with pytest.raises(BapoError, match=stopped):
        steps.report(context)
    monkeypatch.setattr(steps, "take_turn", lambda *_: None)
    context.buffer.begin_attempt(reopen=True)
    context.buffer.set_status("failed")
    with pytest.raises(BapoError, match="failed meanwhile"):
        steps.evaluate(context, jobs_of())


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
    monkeypatch.setattr(PipelineContext, "from_environment", lambda *_: context)
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
    open_run(context, tmp_path / "another")
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
    monkeypatch.setattr(PipelineContext, "from_environment", lambda *_: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: TrainerJobs(backend, DEPLOYMENT))
    with pytest.raises(SystemExit) as ended, steps.pipeline_step(context.buffer.run):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert backend.deleted == [job_name("bapo", context.buffer.run)]
    if created:
        assert context.buffer.run_state().status == "stopped"
        assert f"start the pipeline with bapo_run={context.buffer.run} and the" in log_lines[-1]
        stopped = context.buffer.run_state().stopped
        assert stopped is not None
        assert stopped.describe().endswith(": its pipeline was terminated")
    else:
        assert log_lines == ["no run was created"]


def test_an_error_is_one_line(
    context: PipelineContext, monkeypatch: pytest.MonkeyPatch, small_model: Any
) -> None:
    backend = ScriptedBackend()
    monkeypatch.setattr(PipelineContext, "from_environment", lambda *_: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: TrainerJobs(backend, DEPLOYMENT))
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    with (
        pytest.raises(SystemExit) as ended,
        steps.pipeline_step(context.buffer.run) as (step_context, _),
    ):
        steps.prepare(step_context, read_config("mine", {"steps": "many"}, None, [], {}))
    assert str(ended.value.code).startswith("error: config: steps: input should be a valid integer")
    assert "\n" not in str(ended.value.code)


def test_a_step_logs_to_the_stream_of_its_error(
    stack: Endpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A container's two streams are collected apart: the error came before the lines that the step
    had logged ahead of it, so that it was not the last line of the log."""
    tokens: dict[Scope, str] = dict.fromkeys(("pipeline", "trainer"), stack.token)
    for name, value in connection_variables(stack, tmp_path, tokens).items():
        monkeypatch.setenv(name, value)
    PipelineContext.from_environment("mine").log("a line")
    assert capsys.readouterr() == ("", "a line\n")


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
    assert context.buffer.run_state().status == "stopped", "its pipeline may wait for its turn"
    steps.take_turn(context, jobs)
    assert context.buffer.run_state().status == "running"


def test_a_run_is_finished_when_its_final_weights_are_evaluated_on_every_set(
    stack: Endpoints, log_lines: list[str], tmp_path: Path
) -> None:
    stop_open_runs(stack.buffer_url, stack.token)
    config = sets_config("stepped-sets", steps=2, checkpoint={"every": 2})
    driver = Driver(stack, config)
    context = PipelineContext(
        driver.client, ObjectStore(stack.object_store), tmp_path, log_lines.append
    )
    for step in (1, 2):
        driver.run_step(step)
    driver.client.record_checkpoint(2, "2" * 64)
    driver.client.publish_weights(3, "3" * 64)
    evaluate(driver, 3, "cd-34")
    jobs = TrainerJobs(ScriptedBackend(), DEPLOYMENT)
    assert steps.clean_up(context, jobs) == "stopped", "the collector has not evaluated cd-4 yet"
    driver.client.begin_attempt(reopen=True)
    with pytest.raises(BapoError, match="evaluation of the final weights"):
        steps.evaluate(context, jobs, within_s=0.05)
    evaluate(driver, 3, "cd-4")
    first, second = driver.client.evaluation_sets()
    metrics = steps.evaluate(context, jobs)
    assert metrics["held_out_accuracy"] == first.evaluations[-1].mean_accuracy
    assert metrics["accuracy_on_cd-4"] == second.evaluations[-1].mean_accuracy
    assert steps.clean_up(context, jobs) == "finished"


def queue_behind(
    context: PipelineContext, stack: Endpoints, small_model: Any, scratch: Path
) -> tuple[PipelineContext, list[str]]:
    """Starts the run of `context`, and creates another; returns its context and its log."""
    open_run(context, small_model)
    steps.take_turn(context, jobs_of())
    lines: list[str] = []
    second = make_context(stack, lines, scratch)
    open_run(second, small_model)
    return second, lines


def test_a_run_waits_until_the_run_in_front_has_ended(
    context: PipelineContext, stack: Endpoints, small_model: Any, tmp_path: Path
) -> None:
    """Its job would take GPUs and wait, because the replicas work for one run at a time."""
    second, lines = queue_behind(context, stack, small_model, tmp_path)
    backend = ScriptedBackend([JobState("failed", "reached")])

    def train_second() -> None:
        with pytest.raises(BapoError, match="failed: reached"):
            train(second, backend)

    thread = threading.Thread(target=train_second)
    thread.start()
    line = f"waiting: run {context.buffer.run} is in front, of 6 steps; it is at step 0"
    while line not in lines:
        assert thread.is_alive()
    assert second.buffer.run_state().status == "queued"
    assert not backend.created
    context.buffer.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert backend.created
    assert lines.count(line) == 1
    second.buffer.stop()


def test_a_run_that_is_stopped_while_it_waits_fails_the_step(
    context: PipelineContext, stack: Endpoints, small_model: Any, tmp_path: Path
) -> None:
    second, lines = queue_behind(context, stack, small_model, tmp_path)
    failures: list[str] = []

    def wait() -> None:
        try:
            steps.take_turn(second, jobs_of())
        except ServiceError as error:
            failures.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not any(line.startswith("waiting:") for line in lines):
        assert thread.is_alive()
    second.buffer.stop()
    thread.join(60)
    assert "is stopped by token 'from the environment'; continue it with" in failures[0]


@pytest.mark.parametrize("index", ["0", "1"])
def test_a_retry_by_hand_continues_a_stopped_run_and_an_automatic_one_does_not(
    context: PipelineContext,
    small_model: Any,
    stack: Endpoints,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    index: str,
) -> None:
    """Kubeflow's "Retry" begins at the failed step, after clean-up has stopped the run. An
    automatic retry follows a `bapo stop`, which it must not undo."""
    open_run(context, small_model)
    context.buffer.stop()
    environment = {
        **stack.environment(),
        "KFP_RETRY_INDEX": index,
        "BAPO_WORKFLOW": "bapo-x7",
        LOCAL_JOBS: str(tmp_path),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    retried = PipelineContext.from_environment(context.buffer.run)
    if index == "0":
        steps.take_turn(retried, jobs_of())
        assert retried.buffer.run_state().status == "running"
    else:
        with pytest.raises(ServiceError, match=r"is stopped by .*; continue it"):
            steps.take_turn(retried, jobs_of())
        retried.buffer.begin_attempt(reopen=True)
        retried.buffer.stop(by=retried.name, reason="a step of its pipeline failed")
        steps.take_turn(retried, jobs_of())
        assert retried.buffer.run_state().status == "running", "its own step has stopped it"


@pytest.fixture
def past(stack: Endpoints, context: PipelineContext) -> Trained:
    """A run that a pipeline has trained for six steps; its first checkpoint is of step 5."""
    model = {"path": "store://models/any/0"}
    driver = Trained(stack, small_config(f"{context.buffer.run}-past", model=model, steps=6))
    driver.run_steps(1, 6)
    driver.client.set_status("finished")
    return driver


def test_a_pipeline_makes_a_fork_once_with_its_own_token(
    context: PipelineContext, past: Trained, log_lines: list[str]
) -> None:
    token = past.client.create_token(f"fork {context.buffer.run}", "pipeline").token
    run, name = context.buffer.run, past.config.name
    client = BufferClient(context.buffer.url, token, run=run)
    own = replace(context, buffer=client, workflow="team/bapo-1")
    steps.check_run(own, jobs_of(), name)
    overrides = ["algorithm=grpo", "sync.every=1"]
    request = read_fork(run, name, 4, COUNTDOWN, "", overrides, {"learning_rate": 1e-5})
    assert request is not None
    config = steps.open_fork(own, jobs_of(), name, request)
    assert (config.name, config.algorithm, config.optimizer.learning_rate) == (run, "grpo", 1e-5)
    assert config.task == past.config.task
    assert log_lines[:3] == [
        f"run {run} does not exist: it is created, and made as a fork of run {name}",
        f"run {run} is a fork of {name} at step 4",
        "step 4 has no checkpoint: steps 1 to 4 are trained again first, on their recorded batches",
    ]
    assert log_lines[3].startswith("from step 5 on: ")
    state = own.buffer.run_state()
    assert (state.forked_from, state.current_step) == (
        wire.ForkOrigin(run=name, step=4, checkpoint=0),
        4,
    )
    repeated = steps.open_fork(own, jobs_of(), name, request)
    assert repeated == config, "a step that is repeated finds it"
    another = replace(own, workflow="team/bapo-2")
    with pytest.raises(BapoError, match="is created, and workflow team/bapo-1 trains it"):
        steps.open_fork(another, jobs_of(), name, request)
    steps.check_run(own, jobs_of(), name)
    assert "it is continued" in log_lines[-1]
    assert steps.segment_end(own, 1, 1) == 6


@pytest.mark.parametrize(
    ("fork_of", "fork_step", "overrides", "message"),
    [
        ("absent", 5, [], "fork_step=5: .*absent"),
        ("", 9, [], "fork_step=9: step 9 of run '.*' is not committed; the last committed step is"),
        ("", 5, ["model.path=tiny"], "fork_step=5: .*model.path=tiny cannot change in a fork"),
        (
            "",
            5,
            ["optimizer.learning=1"],
            "fork_step=5: .*override optimizer.learning: no such key",
        ),
        ("", 5, ["steps=5"], "fork_step=5: .*it has no step left to train after step 5"),
    ],
)
def test_a_fork_that_is_refused_fails_the_step_in_one_line(
    context: PipelineContext,
    past: Trained,
    fork_of: str,
    fork_step: int,
    overrides: list[str],
    message: str,
) -> None:
    name = fork_of or past.config.name
    request = read_fork(context.buffer.run, name, fork_step, COUNTDOWN, "", overrides, {})
    assert request is not None
    with pytest.raises(ConfigError) as refused:
        steps.open_fork(context, jobs_of(), name, request)
    assert re.fullmatch(f"fork_of={name}, {message}.*", str(refused.value))


def test_a_run_that_no_pipeline_made_cannot_be_forked_by_one(
    context: PipelineContext, stack: Endpoints
) -> None:
    driver = Driver(stack, small_config(f"{context.buffer.run}-here", steps=2))
    request = wire.ForkRequest(name=context.buffer.run, step=1)
    with pytest.raises(ConfigError, match="its model tiny is not in the object store"):
        steps.open_fork(context, jobs_of(), driver.config.name, request)


def test_a_stored_configuration_is_read_by_name_or_address(
    context: PipelineContext, stack: Endpoints
) -> None:
    text = "# a comment\nsteps: 3\n"
    context.buffer.store_config("stored", "steps: 2")
    context.buffer.store_config("stored", text)
    load = partial(load_stored_config, buffer=context.buffer, store=context.store)
    assert load("stored") == text
    assert "stored" in [config.name for config in context.buffer.configs()]
    context.store.put("configs/mine.yaml", text.encode())
    assert load(f"s3://{context.store.settings.bucket}/configs/mine.yaml") == text
    assert load("") is None
    for name, message in (
        ("absent", "stored configuration 'absent'; `bapo config push` stores one"),
        ("s3://bucket", "give s3://bucket/key"),
        ("s3://no-such-bucket/key", "s3://no-such-bucket/key: .* NoSuchBucket"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(name)
    for invalid in ("steps: many", "# all of it in one line: steps: 3"):
        with pytest.raises(ServiceError):
            context.buffer.store_config("invalid", invalid)


def test_imported_artifacts_get_addresses_that_a_configuration_takes(
    context: PipelineContext, small_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text('{"nums": [1, 2], "target": 3}\n')
    address = steps.import_data(context, data)
    assert address.startswith(f"s3://{context.store.settings.bucket}/imports/")
    assert address.endswith("/sums.jsonl"), "the ending says what kind of file it is"
    assert context.store.read_address(address) == data.read_bytes()
    for content, ending in ((b"PAR1", ".parquet"), (b" [{}]", ".json"), (b"{}\n{}", ".jsonl")):
        (tmp_path / "dataset").write_bytes(content)  # as the artifact of a component is named
        assert steps.import_data(context, tmp_path / "dataset").endswith(f"/dataset{ending}")
    path = steps.import_model(context, small_model)
    config = read_config(context.buffer.run, CONFIG, None, [], {"model": path})
    request = json.loads(steps.prepare(context, config))
    assert request["config"]["model"]["path"] == path
    with pytest.raises(BapoError, match="the artifact is no file; import a Parquet, JSONL or JSON"):
        steps.import_data(context, tmp_path)
    with pytest.raises(BapoError, match=r"it has no config\.json"):
        steps.import_model(context, tmp_path)


def test_the_summary_leads_to_the_runs_page_of_the_dashboard(context: PipelineContext) -> None:
    exposed = replace(context, dashboard_url="https://bapo.example")
    assert "(https://bapo.example/#/runs/mine)" in dashboard_link(exposed, "mine")
    inside = replace(context, buffer_url="http://bapo-buffer.team.svc:8700")
    hint = dashboard_link(inside, "mine")
    assert "`kubectl port-forward service/bapo-buffer 8700`" in hint
    assert "<http://127.0.0.1:8700/#/runs/mine>" in hint


def test_orphans_are_jobs_without_an_active_run_and_runs_without_a_pipeline(
    context: PipelineContext, stack: Endpoints, small_model: Any, tmp_path: Path
) -> None:
    backend = ScriptedBackend([JobState("running")])
    open_run(context, small_model)
    steps.take_turn(replace(context, workflow="team/bapo-1"), jobs_of())
    assert context.buffer.run_state().workflow == "team/bapo-1"
    name = context.buffer.run
    job, deleted = job_name("bapo", name), job_name("bapo", "deleted")
    backend.create(TrainingJob(name, DEPLOYMENT, Resources()))
    backend.create(TrainingJob("deleted", DEPLOYMENT, Resources()))
    waiting_run = replace(make_context(stack, [], tmp_path), workflow="team/bapo-2")
    open_run(waiting_run, small_model)
    waiting_run.buffer.take_turn(workflow=waiting_run.workflow)

    def find() -> steps.Orphans:
        return steps.find_orphans(context.buffer, backend)

    assert find() == steps.Orphans({deleted: "deleted"}, {deleted: None}, {})
    # The job of an earlier pipeline is an orphan, but not the run that another one has taken over.
    backend.without_pipeline.append(job)
    assert find() == steps.Orphans({deleted: "deleted", job: name}, {deleted: None, job: None}, {})
    # A pipeline that was killed with its node leaves a run whose status is still `running`. And one
    # whose workflow was deleted leaves no job, but a run that keeps others waiting.
    backend.ended_workflows += ["team/bapo-1", "team/bapo-2"]
    orphans = find()
    assert orphans.runs == {name: "team/bapo-1", waiting_run.buffer.run: "team/bapo-2"}
    # A third pipeline takes the second run over before the reaper stops it.
    waiting_run.buffer.take_turn(workflow="team/bapo-3", instead_of="team/bapo-2")
    steps.remove_orphans(context.buffer, backend, orphans, print)
    assert sorted(backend.deleted) == [deleted, job]
    context.buffer.run = name
    stopped = context.buffer.run_state().stopped
    assert stopped is not None
    assert stopped.describe().startswith("the reaper: its workflow team/bapo-1 has ended")
    assert waiting_run.buffer.run_state().status == "queued"
    waiting_run.buffer.stop()


# ---- two pipelines of one name ------------------------------------------------------------------


@dataclass
class TwoPipelines:
    """The first pipeline trains a run, and a second one has the same name."""

    first: PipelineContext
    second: PipelineContext
    lines: list[str]
    """Log of the second one."""
    backend: ScriptedBackend

    @property
    def jobs(self) -> TrainerJobs:
        return jobs_of(self.backend)

    def check_first(self) -> None:
        """Checks that the first one has lost nothing."""
        state = self.first.buffer.run_state()
        assert (state.status, state.workflow) == ("running", self.first.workflow)
        assert not self.backend.deleted
        steps.own_run(self.first)


@pytest.fixture
def two(context: PipelineContext, small_model: Any, stack: Endpoints) -> TwoPipelines:
    lines: list[str] = []
    first = replace(context, workflow="team/bapo-1")
    second = replace(context, workflow="team/bapo-2", log=lines.append)
    backend = ScriptedBackend([JobState("running")], workflow="team/bapo-1")
    steps.check_run(first, jobs_of(backend))
    open_run(first, small_model)
    steps.take_turn(first, jobs_of(backend))
    first.buffer.begin_attempt()
    return TwoPipelines(first, second, lines, backend)


ANOTHERS = "is running, and workflow team/bapo-1 trains it; leave bapo_run empty for a new run"


def test_a_second_pipeline_of_the_name_is_refused_first_of_all(two: TwoPipelines) -> None:
    for refused in (steps.check_run, steps.take_turn, partial(steps.sync, until=2), steps.evaluate):
        with pytest.raises(BapoError, match=ANOTHERS):
            refused(two.second, two.jobs)
    with pytest.raises(BapoError, match=ANOTHERS):
        steps.train(two.second, two.jobs, 2, Resources())
    two.check_first()


@pytest.mark.parametrize("end", ["error", "terminated", "clean-up", "other configuration"])
def test_a_second_pipeline_of_the_name_ends_without_touching_the_run(
    two: TwoPipelines, end: str, monkeypatch: pytest.MonkeyPatch, small_model: Any
) -> None:
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    monkeypatch.setattr(PipelineContext, "from_environment", lambda *_: two.second)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: two.jobs)
    with suppress(SystemExit), steps.pipeline_step(two.second.buffer.run) as (context, jobs):
        if end == "error":
            read_config("mine", CONFIG, None, ["rolout.group_size=4"], {})
        elif end == "terminated":
            signal.raise_signal(signal.SIGTERM)
        elif end == "other configuration":
            open_run(context, small_model, "seed=9")
        else:
            assert steps.clean_up(context, jobs) == "running"
    two.check_first()
    name = two.first.buffer.run
    assert two.lines[-1] == (
        f"workflow team/bapo-1 trains run {name}, which is left as it is: running"
    )


def test_a_second_pipeline_that_did_not_find_the_run_yet_changes_nothing(
    two: TwoPipelines, small_model: Any
) -> None:
    """Both were started at the same time, and the second one prepared its run for longer."""
    for step_count in ("6", "9"):
        with pytest.raises(BapoError, match=ANOTHERS):
            open_run_of(two.second, two.jobs, small_model, f"steps={step_count}")
    with pytest.raises(ServiceError, match="workflow team/bapo-1 trains it") as refused:
        two.second.buffer.change_config({"steps": 9}, workflow="team/bapo-2")
    assert refused.value.status == 409
    two.check_first()
    state = two.first.buffer.run_state()
    assert (state.attempt, state.config.steps, state.changes) == (1, 6, [])


@pytest.mark.parametrize("begun_by_fork", [False, True])
def test_a_run_belongs_to_the_pipeline_that_created_it_before_it_is_trained(
    context: PipelineContext, small_model: Any, stack: Endpoints, begun_by_fork: bool
) -> None:
    first = replace(context, workflow="team/bapo-1")
    second = replace(context, workflow="team/bapo-2")
    backend = ScriptedBackend()
    if begun_by_fork:
        driver = Driver(stack, small_config(f"parent-of-{context.buffer.run}"))
        driver.client.fork_run(
            wire.ForkRequest(name=context.buffer.run, step=0, workflow="team/bapo-1")
        )
        driver.client.stop()  # so that it is not in front of its fork
    else:
        open_run_of(first, jobs_of(backend), small_model)
    name = context.buffer.run
    refusal = f"run '{name}' is created, and workflow team/bapo-1 trains it"
    for refused in (steps.check_run, steps.take_turn):
        with pytest.raises(BapoError, match=refusal):
            refused(second, jobs_of(backend))
    with pytest.raises(ServiceError, match=refusal):
        second.buffer.take_turn(reopen=True, workflow="team/bapo-2", instead_of=None)
    with pytest.raises(ServiceError, match=refusal):
        second.buffer.change_config({"steps": 9}, workflow="team/bapo-2")
    steps.stop_run(second, "its pipeline was terminated")
    assert first.buffer.run_state().status == "created"
    # It is free once its pipeline has ended, with a stop or without one.
    backend.ended_workflows.append("team/bapo-1")
    steps.check_run(second, jobs_of(backend))
    steps.stop_run(first, "its pipeline was terminated")
    assert first.buffer.run_state().status == "stopped"
    backend.ended_workflows.clear()
    steps.take_turn(second, jobs_of(backend))
    assert second.buffer.run_state().workflow == "team/bapo-2"


def test_a_pipeline_takes_over_the_run_of_one_that_has_ended(two: TwoPipelines) -> None:
    """Its clean-up did not run, for example because its workflow was deleted."""
    two.backend.ended_workflows.append("team/bapo-1")
    steps.check_run(two.second, two.jobs)
    steps.take_turn(two.second, two.jobs)
    assert two.second.buffer.run_state().workflow == "team/bapo-2"
    with pytest.raises(BapoError, match="workflow team/bapo-2 has taken run"):
        steps.own_run(two.first)
    assert steps.clean_up(two.first, two.jobs) == "running"
    assert two.second.buffer.run_state().status == "running"


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("absent", "does not exist: it is created, and trained from its first step"),
        ("stopped", "exists, at step 0 of 6: it is continued; it was stopped by alice: why not"),
        ("running", "exists, at step 0 of 6, and is running: it is continued"),
        ("finished", "is finished, so that nothing is trained; to train anew, leave bapo_run emp"),
    ],
)
def test_the_first_line_says_whether_a_run_is_created_or_continued(
    context: PipelineContext, small_model: Any, log_lines: list[str], status: str, line: str
) -> None:
    if status != "absent":
        open_run(context, small_model)
        context.buffer.begin_attempt()
        if status == "stopped":
            context.buffer.stop(by="alice", reason="why not")
        elif status == "finished":
            context.buffer.set_status("finished")
    log_lines.clear()
    steps.check_run(context, jobs_of())
    assert log_lines[0].startswith(f"run {context.buffer.run} {line}")


def test_a_run_that_is_being_deleted_is_refused(
    context: PipelineContext, stack: Endpoints, small_model: Any
) -> None:
    open_run(context, small_model)
    url = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "update run set status = 'deleting' where name = %s", (context.buffer.run,)
        )
    with pytest.raises(BapoError, match="is being deleted; wait until `bapo runs` no longer lists"):
        steps.check_run(context, jobs_of())


def test_an_invalid_name_fails_the_first_step_and_not_clean_up(
    context: PipelineContext, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context.buffer.run = "My Run"
    backend = ScriptedBackend([JobState("running")])
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    monkeypatch.setattr(PipelineContext, "from_environment", lambda *_: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: jobs_of(backend))
    with pytest.raises(SystemExit) as ended, steps.pipeline_step("My Run") as (own, jobs):
        steps.check_run(own, jobs)
    assert str(ended.value.code).startswith("error: bapo_run is 'My Run': a name has lower-case")
    assert "give for example 'my-run', or leave it empty" in str(ended.value.code)
    assert steps.clean_up(context, jobs_of(backend)) == "absent"
    assert log_lines == ["no run was created: 'My Run' is no valid name"] * 2
    assert not backend.deleted


def test_a_step_that_fails_deletes_the_job_and_stops_the_run_with_its_reason(
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubeflow does not repeat a clean-up that has succeeded, in a run that was retried."""
    open_run(context, small_model)
    context.buffer.begin_attempt()
    backend = ScriptedBackend([JobState("failed", "no such model")])
    monkeypatch.delenv(LOCAL_JOBS, raising=False)
    monkeypatch.setattr(PipelineContext, "from_environment", lambda *_: context)
    monkeypatch.setattr(TrainerJobs, "from_environment", lambda: jobs_of(backend))
    with pytest.raises(SystemExit), steps.pipeline_step(context.buffer.run) as (own, jobs):
        steps.train(own, jobs, 2, Resources())
    assert backend.deleted
    stopped = context.buffer.run_state().stopped
    assert stopped is not None
    assert stopped.reason == (
        f"a step of its pipeline failed: job {backend.deleted[-1]} failed: no such model"
    )


# ---- what a job does ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("w-0 exited with 137 (OOMKilled)", "raise memory_per_worker, which is 32Gi"),
        ("w-0 exited with 137 (Error)", "it was killed, probably for its memory"),
        ("OOMKilled: Error pod w-0 exitCode: 137", "raise memory_per_worker"),
        ("w-0 exited with 143 (Error)", ""),
    ],
)
def test_a_job_that_dies_again_and_again_fails_the_step_with_its_reason(
    context: PipelineContext, small_model: Any, reason: str, remedy: str
) -> None:
    open_run(context, small_model)
    script: list[JobState | None] = []
    for restarts in range(10):
        script += [
            JobState("running", restarts=restarts, last_end=reason),
            JobState("restarting", reason, restarts=restarts, last_end=reason),
        ]
    with pytest.raises(BapoError, match=r"restarted 4 times without a training step") as caught:
        train(context, ScriptedBackend(script))
    assert reason in str(caught.value)
    assert remedy in str(caught.value)


def test_restarts_between_which_steps_are_trained_are_none_too_many(
    stack: Endpoints, log_lines: list[str], tmp_path: Path
) -> None:
    stop_open_runs(stack.buffer_url, stack.token)
    driver = Driver(stack, small_config("stepped-restarts"))
    context = PipelineContext(
        driver.client, ObjectStore(stack.object_store), tmp_path, log_lines.append
    )

    class Backend(ScriptedBackend):
        """Restarts three times before each step."""

        restarts = 0

        def state(self, name: str) -> JobState | None:  # noqa: ARG002
            self.restarts += 1
            if self.restarts % 3 == 0 and self.restarts <= 9:
                driver.run_step(self.restarts // 3)
            return JobState("restarting", "w-0 exited with 143", restarts=self.restarts)

    backend = Backend()
    with pytest.raises(BapoError, match="restarted 4 times without a training step"):
        train(context, backend)
    assert backend.restarts == 13, "nine restarts with steps, and four without"


@pytest.mark.parametrize("restarts", [1, 4, 9])
def test_restarts_of_an_adopted_job_before_its_last_step_do_not_count(
    context: PipelineContext, small_model: Any, restarts: int
) -> None:
    """A TrainJob counts all of its restarts, those of earlier segments of the pipeline too."""
    open_run(context, small_model)
    running = JobState("running", restarts=restarts)
    script: list[JobState | None] = [running] * 5
    script += [replace(running, restarts=restarts + more) for more in (1, 2, 3)]
    reached = JobState("failed", "reached")
    with pytest.raises(BapoError, match="failed: reached"):
        train(context, ScriptedBackend([*script, reached], exists=True))
    script.append(replace(running, restarts=restarts + 4))
    with pytest.raises(BapoError, match="restarted 4 times without a training step"):
        train(context, ScriptedBackend([*script, reached], exists=True))


def test_a_restart_does_not_set_back_the_time_that_a_job_waits(
    context: PipelineContext, small_model: Any
) -> None:
    open_run(context, small_model)
    no_node = JobState("waiting", "w-0 has no node: Insufficient cpu")
    restarting = JobState("restarting", no_node.reason)
    script: list[JobState | None] = [no_node, restarting, JobState("running")] * 200
    with pytest.raises(BapoError, match=r"not started within 0 s: .*; add nodes, free some, or"):
        train(context, ScriptedBackend(script), start_within_s=0.2)


def test_a_container_that_cannot_be_created_fails_the_step_before_the_nodes_are_late(
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_watch, "BLOCKED_WITHIN_S", 0.1)
    open_run(context, small_model)
    reason = 'w-0: CreateContainerConfigError: secret "bapo-s3" not found'
    blocked = JobState("waiting", reason, blocked=True)
    with pytest.raises(BapoError, match=r"secret \"bapo-s3\" not found; create what it names in"):
        train(context, ScriptedBackend([blocked]))


def test_a_run_that_was_stopped_trains_from_its_last_checkpoint(
    stack: Endpoints, log_lines: list[str], tmp_path: Path
) -> None:
    stop_open_runs(stack.buffer_url, stack.token)
    driver = Driver(stack, small_config("stepped-rewound"))
    for step in (1, 2, 3):
        driver.run_step(step)
    driver.client.record_checkpoint(2, "2" * 64)
    driver.client.stop()
    context = PipelineContext(
        driver.client, ObjectStore(stack.object_store), tmp_path, log_lines.append
    )
    with pytest.raises(BapoError, match="reached"):
        steps.train(
            context, jobs_of(ScriptedBackend([JobState("failed", "reached")])), 4, Resources()
        )
    assert log_lines[0] == "training from step 3 to 4"


def test_a_job_that_was_deleted_is_created_again(
    context: PipelineContext, small_model: Any, log_lines: list[str]
) -> None:
    open_run(context, small_model)
    backend = ScriptedBackend([JobState("running"), None, JobState("failed", "reached")])
    with pytest.raises(BapoError, match="failed: reached"):
        train(context, backend)
    assert len(backend.created) == 2
    assert any("was deleted while it trained, and is created again" in line for line in log_lines)


def test_a_job_that_runs_without_training_ends_its_step_unless_the_run_is_paused(
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_watch, "STALLED_WITHIN_S", 0.1)
    open_run(context, small_model)
    steps.take_turn(context, jobs_of())
    context.buffer.pause()
    script = [JobState("running")] * 100  # a second
    with pytest.raises(BapoError, match="failed: reached"):
        train(context, ScriptedBackend([*script, JobState("failed", "reached")]))
    context.buffer.resume()
    stalled = (
        r"has run for 0 h without a training step \(no replica has reported\); see the logs of"
    )
    with pytest.raises(BapoError, match=stalled):
        train(context, ScriptedBackend([*script, JobState("failed", "reached")]))


def test_whatever_waits_ends_when_the_bucket_is_gone(
    context: PipelineContext, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(context, small_model)
    monkeypatch.setattr(steps, "BUCKET_CHECK_INTERVAL_S", 0.0)
    without_bucket = context.store.settings.model_copy(update={"bucket": "gone"})
    context = replace(context, store=ObjectStore(without_bucket))
    gone = f"object store {without_bucket.endpoint}: there is no bucket gone; check its name, or"
    with pytest.raises(BapoError, match=gone):
        train(context, ScriptedBackend([JobState("running")]))
    with pytest.raises(BapoError, match=gone):
        steps.sync(context, jobs_of(), 2)
    with pytest.raises(BapoError, match=gone):
        steps.evaluate(context, jobs_of())


def test_steps_wait_for_an_object_store_that_does_not_answer(
    context: PipelineContext,
    small_model: Any,
    log_lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_run(context, small_model)
    monkeypatch.setattr(steps, "BUCKET_CHECK_INTERVAL_S", 0.0)
    unreachable = context.store.settings.model_copy(update={"endpoint": "http://127.0.0.1:9"})
    context = replace(context, store=ObjectStore(unreachable, retries=0))
    with pytest.raises(BapoError, match="failed: reached"):
        train(context, ScriptedBackend([JobState("running"), JobState("failed", "reached")]))
    assert any("object store http://127.0.0.1:9: cannot reach" in line for line in log_lines)


def test_whatever_waits_says_what_for_every_minute(
    context: PipelineContext,
    small_model: Any,
    log_lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "SAY_EVERY_S", 0.0)
    open_run(context, small_model)
    steps.take_turn(context, jobs_of())
    log_lines.clear()
    served = iter([None, None, None, 3])
    monkeypatch.setattr(steps, "_oldest_served", lambda *_: next(served))
    assert steps.sync(context, jobs_of(), 2) == 3
    line = "waiting for every replica serving version 1 or a later one, for up to 60 min"
    again = f"{line}: no replica has reported; for 0 min so far"
    assert log_lines[:3] == [f"{line}: no replica has reported", again, again]
    log_lines.clear()
    no_node = JobState("waiting", "no node")
    with pytest.raises(BapoError, match="reached"):
        train(context, ScriptedBackend([no_node, no_node, no_node, JobState("failed", "reached")]))
    line = f"job {job_name('bapo', context.buffer.run)} is waiting: no node"
    again = f"{line}; for 0 min so far without a step: no replica has reported"
    assert log_lines[1:] == [line, again, again]


def test_the_metrics_of_a_segment_are_those_of_its_end(
    stack: Endpoints, log_lines: list[str], tmp_path: Path
) -> None:
    """The job trains on while the steps of the pipeline run."""
    stop_open_runs(stack.buffer_url, stack.token)
    config = small_config("stepped-segments", steps=4, evaluation={"every": 2})
    driver = Driver(stack, config)
    context = PipelineContext(
        driver.client, ObjectStore(stack.object_store), tmp_path, log_lines.append
    )
    evaluate(driver, 1, "test")
    for step in (1, 2, 3, 4):
        driver.run_step(step)
        driver.client.record_checkpoint(step, f"{step}" * 64)
        driver.client.publish_weights(step + 1, f"{step + 1}" * 64)
    for version in (2, 4, 5):
        evaluate(driver, version, "test")
    trained = driver.client.steps()
    evaluations = {row.version: row for row in driver.client.evaluations()}
    for until, version in ((1, 2), (2, 2), (3, 4), (4, 5), (None, 5)):
        metrics = steps.report(context, until).metrics
        last = trained[(until or 4) - 1]
        assert metrics["step"] == last.step
        assert metrics["reward"] == last.mean_reward
        assert metrics["held_out_accuracy"] == evaluations[version].mean_accuracy
        assert metrics["rollouts"] == sum(row.rollouts for row in trained[: last.step])
        seconds = (last.committed_at - trained[0].committed_at).total_seconds()
        assert metrics["seconds"] == seconds
    assert metrics.items() >= {"loss": last.metrics["loss"]}.items()
