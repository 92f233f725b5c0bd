"""The pipeline's steps on the real buffer service, with a backend that says what a test wants."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from bapo_core.errors import BapoError
from pipelines import steps
from pipelines.backends import JobState
from pipelines.pytorchjob import Resources, job_name
from pipelines.steps import Surroundings, Trainers
from services.buffer.api.client import BufferClient
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.conftest import EASY
from tests.unit.pipelines.test_pytorchjob import DEPLOYMENT

_NUMBERS = count()


@dataclass
class Scripted:
    """Its job is in one state after another; the last one stays."""

    script: list[JobState | None] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

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
            each["metadata"]["name"]: each["metadata"]["labels"]["bapo/run"]
            for each in self.created
        }

    def abandoned(self, name: str) -> bool:
        return name in self.left_behind


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "LOOK_EVERY_S", 0.01)
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def around(stack: Endpoints, said: list[str]) -> Surroundings:
    client = BufferClient(stack.buffer_url, stack.token, run=f"stepped-{next(_NUMBERS)}")
    return Surroundings(client, ObjectStore(stack.object_store), said.append)


CONFIG = f"""
steps: 6
task: {{options: {EASY}, train_prompts: 48, test_prompts: 8}}
rollout: {{prompts_per_step: 16, group_size: 4}}
optimizer: {{minibatch_prompts: 4}}
checkpoint: {{every: 3}}
"""


def opened(around: Surroundings, small_model: Any, *overrides: str) -> list[int]:
    lines = "\n".join([f"model.path={small_model}", *overrides])
    return steps.open_run(around, steps.prepare(around, CONFIG, lines), 3)


def train(around: Surroundings, backend: Scripted, **options: Any) -> None:
    steps.train(around, Trainers(backend, DEPLOYMENT), 2, Resources(gpus=0), **options)


def test_a_run_is_opened_once_and_only_as_it_is(around: Surroundings, small_model: Any) -> None:
    assert opened(around, small_model) == [2, 6]
    created = around.buffer.run_state()
    assert created.config.model.path.startswith("store://models/")
    assert opened(around, small_model) == [2, 6]
    assert opened(around, small_model, "trainer.processes=2") == [2, 6], "where, not what"
    alone = steps.open_run(around, steps.prepare(around, CONFIG, f"model.path={small_model}"), 100)
    assert alone == [6, 6], "a list of one is none to KFP"
    with pytest.raises(BapoError, match=r"another configuration \(seed differ\)"):
        opened(around, small_model, "seed=9")
    assert around.buffer.run_state() == created


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([JobState("running"), JobState("failed", "no such model")], "failed: no such model"),
        ([JobState("running"), None], "was deleted while it trained"),
        ([JobState("running"), JobState("succeeded")], "succeeded, but run .* stands at step 0"),
        ([JobState("waiting", "Insufficient gpu")], "has not started within 0 s: Insufficient gpu"),
        ([JobState("waiting")], "does the training operator run"),
    ],
)
def test_a_job_that_does_not_train_fails_the_step_with_words(
    around: Surroundings,
    small_model: Any,
    script: list[JobState | None],
    words: str,
) -> None:
    opened(around, small_model)
    with pytest.raises(BapoError, match=words):
        train(around, Scripted(script), start_within_s=0.05)


def test_the_log_says_what_the_job_does_once_each_time_it_changes(
    around: Surroundings, small_model: Any, said: list[str]
) -> None:
    opened(around, small_model)
    said.clear()
    waiting = JobState("waiting", "no node")
    script: list[JobState | None] = [waiting, waiting, JobState("running"), JobState("failed", "x")]
    with pytest.raises(BapoError):
        train(around, Scripted(script))
    name = job_name("bapo", around.buffer.run)
    waits, runs = f"job {name} is waiting: no node", f"job {name} is running"
    assert said == ["from step 1 to 2", waits, runs]


def test_replicas_that_never_serve_fail_the_step_with_words(
    around: Surroundings, small_model: Any
) -> None:
    opened(around, small_model)
    with pytest.raises(BapoError, match=r"every replica serving version 1 .* rollout StatefulSet"):
        steps.sync(around, 2, within_s=0.05)
    around.buffer.stop()
    with pytest.raises(BapoError, match="was stopped meanwhile"):
        steps.sync(around, 2)


def test_an_export_of_an_unfinished_run_is_refused(
    around: Surroundings, small_model: Any, tmp_path: Any
) -> None:
    opened(around, small_model)
    with pytest.raises(BapoError, match="has no final weights yet"):
        steps.export(around, tmp_path)


def test_a_step_whose_node_is_drained_leaves_the_job_at_work(
    around: Surroundings, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(around, small_model)
    around.buffer.begin_attempt()
    backend = Scripted([JobState("running")])
    trainers = Trainers(backend, DEPLOYMENT, cancelled=lambda: False)
    monkeypatch.delenv(steps.JOBS_HERE, raising=False)
    monkeypatch.setattr(Surroundings, "of", lambda _: around)
    monkeypatch.setattr(Trainers, "of_environment", lambda: trainers)
    with pytest.raises(SystemExit), steps.step(around.buffer.run):
        signal.raise_signal(signal.SIGTERM)
    assert not backend.deleted
    assert around.buffer.run_state().status == "running"


def test_a_run_goes_on_with_the_model_that_it_began_with(
    around: Surroundings, small_model: Any, tmp_path: Any
) -> None:
    """What a name stands for may be something else by now."""
    opened(around, small_model)
    model = around.buffer.run_state().config.model.path
    assert opened(around, tmp_path / "another") == [2, 6]
    assert around.buffer.run_state().config.model.path == model


@pytest.mark.parametrize("there", [True, False])
def test_a_step_that_is_cancelled_leaves_nothing_at_work(
    around: Surroundings,
    small_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
    there: bool,
) -> None:
    """Kubeflow ends the step's pod, whichever step it is; also before there is a run."""
    if there:
        opened(around, small_model)
        around.buffer.begin_attempt()
    backend = Scripted([JobState("running")])
    monkeypatch.delenv(steps.JOBS_HERE, raising=False)
    monkeypatch.setattr(Surroundings, "of", lambda _: around)
    monkeypatch.setattr(Trainers, "of_environment", lambda: Trainers(backend, DEPLOYMENT))
    with pytest.raises(SystemExit) as ended, steps.step(around.buffer.run):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert backend.deleted == [job_name("bapo", around.buffer.run)]
    if there:
        assert around.buffer.run_state().status == "stopped"
        assert "start the pipeline with the same run" in said[-1]
    else:
        assert said == ["cancelled before there was a run"]


def test_what_goes_wrong_is_one_line(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch, small_model: Any
) -> None:
    backend = Scripted()
    monkeypatch.setattr(Surroundings, "of", lambda _: around)
    monkeypatch.setattr(Trainers, "of_environment", lambda: Trainers(backend, DEPLOYMENT))
    monkeypatch.delenv(steps.JOBS_HERE, raising=False)
    with pytest.raises(SystemExit) as ended, steps.step(around.buffer.run) as (found, _):
        steps.prepare(found, "steps: many", "")
    assert str(ended.value.code).startswith("error: config: steps: input should be a valid integer")
    assert not backend.deleted, "an error is no cancellation: the step is repeated"


def test_cleaning_up_stops_a_run_that_is_not_finished_and_starting_again_resumes_it(
    around: Surroundings, small_model: Any
) -> None:
    backend = Scripted([JobState("running")])
    trainers = Trainers(backend, DEPLOYMENT)
    assert steps.clean_up(around, trainers) == "absent"
    opened(around, small_model)
    around.buffer.begin_attempt()
    assert steps.clean_up(around, trainers) == "stopped"
    assert around.buffer.run_state().status == "stopped"
    opened(around, small_model)
    assert around.buffer.run_state().status == "running"


def test_lost_jobs_are_those_whose_run_is_not_at_work(
    around: Surroundings, small_model: Any
) -> None:
    backend = Scripted([JobState("running")])
    opened(around, small_model)
    around.buffer.begin_attempt()
    with pytest.raises(BapoError):
        train(around, Scripted([JobState("failed")]))
    backend.create({"metadata": {"name": "ours", "labels": {"bapo/run": around.buffer.run}}})
    backend.create({"metadata": {"name": "old", "labels": {"bapo/run": "deleted-long-ago"}}})
    lost = {"old": "deleted-long-ago"}
    assert steps.orphaned_jobs(around.buffer, backend) == lost
    # Killed with its node, a pipeline leaves a run that looks as if it were at work.
    backend.left_behind.append("ours")
    lost["ours"] = around.buffer.run
    assert steps.orphaned_jobs(around.buffer, backend) == lost
    steps.reap(around.buffer, backend, lost)
    assert sorted(backend.deleted) == ["old", "ours"]
    assert around.buffer.run_state().status == "stopped"
