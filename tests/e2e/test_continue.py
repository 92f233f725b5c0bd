"""Stops and continues a run in each of its states, with replicas and a collector that live on.

The pipeline's steps run in this process; services, run watchers, replicas, collector and the
trainer under torchrun are real.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from pipelines import job_watch, steps
from pipelines.local_jobs import LocalBackend
from pipelines.settings import DeploymentSettings
from pipelines.steps import PipelineContext, TrainerJobs
from pipelines.training_job import Deployment, Resources
from services.buffer.api.client import BufferClient
from services.cli.pipeline_local import rollouts
from services.common.objectstore import ObjectStore
from services.common.scopes import SCOPES
from services.stack.stack import Endpoints, running_stack
from tests.e2e.test_run import configuration
from tests.integration.support.driver import create_run

pytestmark = pytest.mark.slow

STEPS, END = 24, 12
RESOURCES = Resources(gpus=0, cpu="1")
WAIT_S = 240.0
IDLE_S = 6.0
"""Seconds without a report after which a replica has left the run."""


class Pipeline:
    """A run of two segments, whose steps tests call one by one."""

    def __init__(self, endpoints: Endpoints, home: Path, model: Path) -> None:
        self.lines: list[str] = []
        self.endpoints = endpoints
        values = configuration("continued", model)
        # Many held-out prompts, so that the run is not finished before it is stopped.
        values["task"] = values["task"] | {"test_prompts": 1000}
        values |= {"steps": STEPS, "checkpoint": {"every": END}, "evaluation": {"every": STEPS}}
        self.config = config_from(values)
        client = BufferClient(endpoints.buffer_url, endpoints.token, run=self.config.name)
        self.context = PipelineContext(
            client, ObjectStore(endpoints.object_store), home, self.lines.append
        )
        deployment = Deployment.from_settings(DeploymentSettings.load(), "local")
        self.jobs = TrainerJobs(LocalBackend(home / "jobs"), deployment)

    def last_step(self, last: int) -> None:
        """Gives the run, before it is created, another number of steps."""
        evaluation = self.config.evaluation.model_copy(update={"every": last})
        self.config = self.config.model_copy(update={"steps": last, "evaluation": evaluation})

    def prepare(self) -> None:
        steps.check_run(self.context, self.jobs)
        steps.open_run(self.context, self.jobs, steps.prepare(self.context, self.config))

    def train(self, until: int) -> None:
        steps.train(self.context, self.jobs, until, RESOURCES)

    def stop(self) -> int:
        """Stops the run as "Terminate" and clean-up do; returns the attempt that its processes
        have left."""
        steps.clean_up(self.context, self.jobs)
        state = self.context.buffer.run_state()
        assert state.status == "stopped"
        return state.attempt

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.lines[-5:]}"
            time.sleep(0.2)

    def wait_until_idle(self) -> None:
        """Waits until the replicas and the collector have left the run: they then remember it."""
        buffer = self.context.buffer
        self.wait_until(
            lambda: all(replica.silent_s > IDLE_S for replica in buffer.replicas()), "idle replicas"
        )


@pytest.fixture(params=[1, 2])
def pipeline(
    request: pytest.FixtureRequest,
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pipeline]:
    monkeypatch.setattr(job_watch, "POLL_INTERVAL_S", 0.1)
    home = Path(tempfile.mkdtemp(prefix="bapo-home-"))
    with running_stack(home, 0) as endpoints:
        rollout = RunConfig.model_validate(
            {"rollout": {"engine": "transformers", "replicas": request.param}}
        ).rollout
        tokens = dict.fromkeys(SCOPES, endpoints.token)
        with rollouts(home, endpoints, rollout, tokens) as environment:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            yield Pipeline(endpoints, home, small_model)
    shutil.rmtree(home)


def occupy(pipeline: Pipeline) -> None:
    """Lets the replicas work for another run, and stops it."""
    endpoints = pipeline.endpoints
    other = BufferClient(endpoints.buffer_url, endpoints.token, run="other")
    create_run(other, pipeline.config.model_copy(update={"name": "other"}))
    assert other.take_turn().granted
    other.begin_attempt()
    pipeline.wait_until(lambda: bool(other.replicas()), "a replica of the other run")
    other.stop()
    other.delete_run()


def test_a_run_goes_on_three_times_in_each_state(pipeline: Pipeline) -> None:
    """Twice with nothing in between, and once with another run."""
    buffer = pipeline.context.buffer
    pipeline.prepare()

    def leave(number: int) -> int:
        """Stops the run and waits until its processes have left it; returns their attempt."""
        left = pipeline.stop()
        pipeline.wait_until_idle()
        if number == 1:
            occupy(pipeline)
        pipeline.prepare()
        return left

    for number in range(3):  # while it trains
        thread = threading.Thread(target=_train_until_stopped, args=[pipeline, END], daemon=True)
        thread.start()
        pipeline.wait_until(lambda: buffer.run_state().current_step > 0, "a step")
        leave(number)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        stopped = "was stopped by `bapo pipeline run-local`: its pipeline ended"
        assert any(stopped in line for line in pipeline.lines)
        pipeline.lines.clear()
    pipeline.train(END)
    for number in range(3):  # between two segments, where *sync* is the first to ask for a turn
        left = leave(number)
        pipeline.train(END)
        steps.sync(pipeline.context, pipeline.jobs, END, within_s=WAIT_S)
        assert buffer.run_state().attempt > left
    pipeline.train(STEPS)
    for number in range(3):  # after the training, where *evaluate* is
        left = leave(number)
        steps.take_turn(pipeline.context, pipeline.jobs)
        assert buffer.run_state().attempt > left
    steps.evaluate(pipeline.context, pipeline.jobs, within_s=WAIT_S)
    pipeline.wait_until(lambda: buffer.run_state().status == "finished", "the end of the run")
    assert steps.clean_up(pipeline.context, pipeline.jobs) == "finished"
    assert [step.step for step in buffer.steps()] == list(range(1, STEPS + 1))


def test_a_run_that_is_stopped_while_its_collector_is_ahead_goes_on(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts of the sync window are delivered, and the next ones are of weights that only the
    second segment's job trains. Replicas that start again serve the weights that there are."""
    # The reports of the replicas before the stop must not count.
    monkeypatch.setattr(steps, "REPLICA_GONE_AFTER_S", IDLE_S)
    pipeline.last_step(8 * END)  # many more steps than are trained until the job is deleted
    buffer = pipeline.context.buffer
    pipeline.prepare()
    pipeline.train(END)
    pipeline.jobs.backend.delete(pipeline.jobs.job_name(buffer.run))

    def is_ahead() -> bool:
        weights = buffer.target_weights()
        return weights.newest is not None and weights.version > weights.newest.number

    pipeline.wait_until(is_ahead, "a collector that waits for weights")
    pipeline.stop()
    pipeline.wait_until_idle()
    pipeline.prepare()
    pipeline.train(END)
    steps.sync(pipeline.context, pipeline.jobs, END, within_s=WAIT_S)
    assert is_ahead(), "the collector must still wait for weights"
    pipeline.train(pipeline.config.steps)
    assert [step.step for step in buffer.steps()] == list(range(1, pipeline.config.steps + 1))


def _train_until_stopped(pipeline: Pipeline, until: int) -> None:
    """Trains, and leaves the error of the stop in the log."""
    try:
        pipeline.train(until)
    except BapoError as error:
        pipeline.lines.append(str(error))
