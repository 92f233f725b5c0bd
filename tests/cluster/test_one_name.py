"""Tests pipelines of one name, and jobs that cannot train, with the API server and the operators of
a real cluster and the real buffer service.

No image of the project is needed, so these tests also run in CI (`make test-admission`): the steps
run in this process, with the rights that the chart gives to a pipeline. Those that are slow, and
run by `make test-cluster-all`, let pods of a small image die. It is made of a static busybox, and
loaded by the command that `BAPO_TEST_LOAD` names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bapo_core.errors import BapoError
from pipelines import steps
from pipelines.configuration import read_config
from pipelines.kubeflow import KubeflowBackend
from pipelines.settings import LOCAL_JOBS, JobKindName, TrainerPod
from pipelines.steps import PipelineContext, TrainerJobs
from pipelines.training_job import Deployment, Resources
from services.buffer.api.client import BufferClient
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.cluster.kubectl import Namespace, kubectl, wait_until
from tests.cluster.small_image import SMALL_IMAGE, make_archive
from tests.cluster.test_admission import KINDS, RUNNER, WAIT_S, configuration
from tests.cluster.test_admission import backend as backend
from tests.cluster.test_admission import deployment as deployment
from tests.cluster.test_admission import namespace as namespace
from tests.cluster.test_admission import nothing_left as nothing_left
from tests.integration.pipelines.test_pipeline_steps import CONFIG, open_run
from tests.integration.support.driver import Driver, small_config, stop_open_runs

pytestmark = pytest.mark.cluster

SMALL = Resources(gpus=0, cpu="50m", memory="64Mi")
_NUMBERS = count()


@dataclass
class Pipeline:
    """A pipeline whose steps run in this process, for a Workflow of the cluster."""

    namespace: Namespace
    context: PipelineContext
    jobs: TrainerJobs
    workflow: str
    lines: list[str]
    error: list[BaseException] = field(default_factory=list)

    def start_training(self, until: int = 2) -> threading.Thread:
        """Runs *train* in the background."""

        def train() -> None:
            try:
                steps.train(self.context, self.jobs, until, SMALL)
            except BapoError as error:
                self.error.append(error)

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        return thread

    def run_step(self, body: Callable[[PipelineContext, TrainerJobs], Any]) -> str:
        """Runs a step as its component does, up to its exit; returns the line of its error."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(LOCAL_JOBS, raising=False)
            patch.setattr(PipelineContext, "from_environment", lambda *_: self.context)
            patch.setattr(TrainerJobs, "from_environment", lambda: self.jobs)
            handlers = {
                n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            }
            try:
                with steps.pipeline_step("") as (context, jobs):
                    body(context, jobs)
            except SystemExit as ended:
                return str(ended.code)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return ""

    def end(self) -> None:
        """Deletes the workflow, and with it what it owns."""
        self.namespace.kubectl("delete", "workflow", self.workflow, "--wait=true")


@dataclass
class Cluster:
    """Starts pipelines on the cluster's namespace."""

    namespace: Namespace
    stack: Endpoints
    deployment: Deployment
    scratch: Path

    def pipeline(self, run: str, **changes: Any) -> Pipeline:
        """changes: of the deployment."""
        workflow = f"bapo-{next(_NUMBERS)}-{os.getpid()}"
        self.namespace.create(
            {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "Workflow",
                "metadata": {"name": workflow},
                "spec": {},
                "status": {"phase": "Running"},
            }
        )
        backend = KubeflowBackend(self.namespace.name, "bapo", configuration(RUNNER))
        lines: list[str] = []
        context = PipelineContext(
            BufferClient(self.stack.buffer_url, self.stack.token, run=run),
            ObjectStore(self.stack.object_store),
            self.scratch,
            lines.append,
            workflow=f"{self.namespace.name}/{workflow}",
        )
        deployment = replace(self.deployment, **changes)
        jobs = TrainerJobs(backend, deployment, backend.owner(workflow))
        return Pipeline(self.namespace, context, jobs, workflow, lines)

    def uid(self, kind: str, run: str) -> str:
        """Returns the uid of the run's job, once it exists."""

        def find() -> str:
            found = self.namespace.get(kind, f"bapo-{run}")
            return "" if found is None else str(found["metadata"]["uid"])

        found: str = wait_until(find, "the job", WAIT_S)
        return found


@pytest.fixture(scope="module")
def workflows(namespace: Namespace) -> None:
    kubectl("apply", "-f", str(Path(__file__).parent / "workflow-crd.yaml"))


@pytest.fixture
def cluster(
    workflows: None,
    namespace: Namespace,
    stack: Endpoints,
    deployment: Deployment,
    tmp_path: Path,
) -> Iterator[Cluster]:
    stop_open_runs(stack.buffer_url, stack.token)
    yield Cluster(namespace, stack, deployment, tmp_path)
    stop_open_runs(stack.buffer_url, stack.token)
    namespace.kubectl("delete", "workflows", "--all", "--wait=true")
    namespace.kubectl("delete", "pytorchjobs,trainjobs", "--all", "--wait=true")


def terminate(context: PipelineContext, jobs: TrainerJobs) -> None:
    signal.raise_signal(signal.SIGTERM)


def mistype(context: PipelineContext, jobs: TrainerJobs) -> None:
    read_config(context.buffer.run, CONFIG, None, ["rolout.group_size=4"], {})


def start_normally(context: PipelineContext, jobs: TrainerJobs) -> None:
    steps.check_run(context, jobs)


def train(context: PipelineContext, jobs: TrainerJobs) -> None:
    """As in a pipeline that was compiled without the check of the first step."""
    steps.train(context, jobs, 2, replace(SMALL, workers=2))


ENDS: dict[str, Callable[[PipelineContext, TrainerJobs], Any]] = {
    "refused by its first step": start_normally,
    "refused by train": train,
    "refused by sync": lambda context, jobs: steps.sync(context, jobs, 2),
    "refused by evaluate": steps.evaluate,
    "a typo": mistype,
    "terminated": terminate,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_pipeline_of_the_name_ends_in_every_way_without_touching_the_first(
    cluster: Cluster, small_model: Any, kind: JobKindName
) -> None:
    run = f"one-name-{kind.lower()}"
    first = cluster.pipeline(run, job_kind=kind)
    open_run(first.context, small_model)
    thread = first.start_training()
    uid = cluster.uid(kind, run)

    def check_first(end: str) -> None:
        state = first.context.buffer.run_state()
        assert (state.status, state.workflow) == ("running", first.context.workflow), end
        job = cluster.namespace.get(kind, f"bapo-{run}")
        assert job is not None, end
        assert job["metadata"]["uid"] == uid, end
        assert "deletionTimestamp" not in job["metadata"], end
        assert thread.is_alive(), first.error

    ends = {
        **ENDS,
        "another configuration": lambda context, _: open_run(context, small_model, "seed=9"),
    }
    for end, body in ends.items():
        second = cluster.pipeline(run, job_kind=kind)
        second.run_step(body)
        check_first(end)
        assert "which is left as it is: running" in second.lines[-1], end
        # Its clean-up follows, and when its workflow has been deleted, the reaper.
        second.run_step(steps.clean_up)
        check_first(end)
        second.end()
        buffer, backend = second.context.buffer, second.jobs.backend
        steps.remove_orphans(buffer, backend, steps.find_orphans(buffer, backend), print)
        check_first(end)

    # The first one is terminated itself, and says so to whoever asks.
    first.run_step(terminate)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "was stopped meanwhile by workflow" in str(first.error[0])
    stopped = first.context.buffer.run_state().stopped
    assert stopped is not None
    assert stopped.reason == "its pipeline was terminated"
    wait_until(lambda: cluster.namespace.get(kind, f"bapo-{run}") is None, "deletion", WAIT_S)


def test_the_reaper_ends_the_run_of_a_deleted_workflow_unless_another_one_has_taken_it(
    cluster: Cluster, small_model: Any
) -> None:
    for taken_over in (False, True):
        run = f"reaped-{taken_over}".lower()
        first = cluster.pipeline(run)
        open_run(first.context, small_model)
        thread = first.start_training()
        cluster.uid("PyTorchJob", run)
        buffer, backend = first.context.buffer, first.jobs.backend
        first.end()
        orphans = steps.find_orphans(buffer, backend)
        assert orphans.runs == {run: first.context.workflow}
        second = cluster.pipeline(run)
        if taken_over:
            steps.take_turn(second.context, second.jobs)
        steps.remove_orphans(buffer, backend, orphans, print)
        buffer.run = run
        state = buffer.run_state()
        assert state.status == ("running" if taken_over else "stopped")
        thread.join(WAIT_S)
        assert not thread.is_alive()
        expected = f"workflow {second.context.workflow} has taken" if taken_over else "the reaper"
        assert expected in str(first.error[0])
        second.run_step(terminate)


def has_line(pipeline: Pipeline, line: str) -> bool:
    return line in pipeline.lines


def has_no_job(pipeline: Pipeline) -> bool:
    return not pipeline.jobs.backend.jobs()


@pytest.mark.parametrize(("name", "valid"), [("My Run", "my-run"), ("COUNTDOWN", "countdown")])
def test_a_name_with_capitals_or_spaces_ends_the_first_step_and_is_asked_of_nobody(
    cluster: Cluster, name: str, valid: str
) -> None:
    pipeline = cluster.pipeline(name)
    error = pipeline.run_step(start_normally)
    assert error.startswith(f"error: bapo_run is '{name}': a name has lower-case letters, digits")
    assert error.endswith(f"give for example '{valid}', or leave it empty for a new run")
    assert pipeline.run_step(steps.clean_up) == ""
    assert pipeline.lines == [f"no run was created: '{name}' is no valid name"] * 2


def test_the_name_of_a_run_that_is_being_deleted_ends_the_first_step(
    cluster: Cluster, small_model: Any
) -> None:
    pipeline = cluster.pipeline("being-deleted")
    open_run(pipeline.context, small_model)

    def set_status(status: str) -> None:
        url = cluster.stack.database_url.replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(url, autocommit=True) as connection:
            change = "update run set status = %s where name = %s"
            connection.execute(change, (status, "being-deleted"))

    set_status("deleting")
    error = pipeline.run_step(start_normally)
    assert error == (
        "error: run 'being-deleted' is being deleted; wait until `bapo runs` no longer lists it, "
        "or give bapo_run another name"
    )
    assert pipeline.run_step(steps.clean_up) == ""
    assert pipeline.context.buffer.run_state().status == "deleting"
    set_status("stopped")


STATES = ("waiting for nodes", "queued", "between two segments", "paused")


@pytest.mark.parametrize("state", STATES)
def test_a_run_that_is_stopped_in_any_state_goes_on_three_times(
    cluster: Cluster, state: str
) -> None:
    """What replicas and collectors wait for is an attempt that they have not left."""
    run = f"goes-on-{state.replace(' ', '-')}"
    driver = Driver(cluster.stack, small_config(run))
    driver.run_step(1)
    driver.run_step(2)
    driver.client.record_checkpoint(2, "2" * 64)
    driver.client.publish_weights(3, "3" * 64)
    other = Driver(cluster.stack, small_config(f"{run}-other")).client
    other.stop()
    driver.client.stop(by="alice")
    for _ in range(3):
        left = driver.client.run_state().attempt
        if state == "queued":
            other.take_turn(reopen=True)
        pipeline = cluster.pipeline(run)
        steps.check_run(pipeline.context, pipeline.jobs)
        thread = None
        if state == "between two segments":
            # The segment is trained, so that the first step to ask for a turn is *sync*.
            steps.train(pipeline.context, pipeline.jobs, 2, SMALL)
            steps.take_turn(pipeline.context, pipeline.jobs)
        else:
            thread = pipeline.start_training(4)
        if state == "queued":
            line = f"waiting: run {run}-other is in front, of 12 steps; it is at step 0"
            wait_until(partial(has_line, pipeline, line), line, WAIT_S)
            assert driver.client.run_state().status == "queued"
        else:
            wait_until(lambda: driver.client.run_state().status == "running", "the turn", WAIT_S)
            assert driver.client.run_state().attempt > left, "replicas would skip this attempt"
            assert driver.client.run_state().current_step == 2
        if thread is not None and state != "queued":
            cluster.uid("PyTorchJob", run)
        if state == "paused":
            driver.client.pause()
        pipeline.run_step(terminate)
        assert driver.client.run_state().status == "stopped"
        wait_until(partial(has_no_job, pipeline), "deletion of the job", WAIT_S)
        if thread is not None:
            thread.join(WAIT_S)
            assert not thread.is_alive(), pipeline.lines
            assert "was stopped meanwhile by workflow" in str(
                pipeline.error[0]
            ) or "is stopped by" in str(pipeline.error[0])
        pipeline.end()
        other.stop()


# ---- jobs that do not train ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_image() -> str:
    """Loads an image whose `python` does what the variable `MODE` says."""
    load = os.environ.get("BAPO_TEST_LOAD")
    if not load or not shutil.which("busybox"):
        pytest.skip("set BAPO_TEST_LOAD to the command that loads an archive, and install busybox")
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "small.tar"
        make_archive(archive)
        subprocess.run([*shlex.split(load), str(archive)], check=True, capture_output=True)
    return SMALL_IMAGE


@pytest.fixture
def secrets(namespace: Namespace) -> Iterator[None]:
    """Creates what the pods read their variables from."""
    namespace.kubectl("create", "configmap", "bapo-connection")
    token = "--from-literal=BAPO_TRAINER_TOKEN=none"
    namespace.kubectl("create", "secret", "generic", "bapo-token", token)
    namespace.kubectl("create", "secret", "generic", "bapo-s3")
    yield
    namespace.kubectl("delete", "configmap/bapo-connection", "secret/bapo-token", "secret/bapo-s3")


def pod(mode: str) -> TrainerPod:
    return TrainerPod(
        extra_env=({"name": "MODE", "value": mode},), scratch_size="1Gi", tmp_size="1Gi"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("oom", r"restarted 4 times .*OOMKilled.*; raise memory_per_worker, which is 64Mi"),
        ("exit 143", r"restarted 4 times without a training step: .*143"),
        ("exit 3", r"failed: .* exited with 3 \(Error\)"),
    ],
)
@pytest.mark.usefixtures("secrets")
def test_a_trainer_that_dies_ends_the_step_with_its_reason(
    cluster: Cluster,
    small_model: Any,
    small_image: str,
    kind: JobKindName,
    mode: str,
    message: str,
) -> None:
    run = f"dies-{mode.replace(' ', '-')}-{kind.lower()}"
    pipeline = cluster.pipeline(run, job_kind=kind, image=small_image, pod=pod(mode))
    open_run(pipeline.context, small_model)
    with pytest.raises(BapoError, match=message):
        steps.train(pipeline.context, pipeline.jobs, 2, SMALL)
    pipeline.run_step(steps.clean_up)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_that_is_missing_ends_the_step_in_its_time(
    cluster: Cluster,
    small_model: Any,
    small_image: str,
    kind: JobKindName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelines.job_watch.BLOCKED_WITHIN_S", 5.0)
    run = f"no-secret-{kind.lower()}"
    pipeline = cluster.pipeline(run, job_kind=kind, image=small_image)
    open_run(pipeline.context, small_model)
    message = r'within 5 s: .*CreateContainerConfigError: configmap "bapo-connection" not found; cr'
    with pytest.raises(BapoError, match=message):
        steps.train(pipeline.context, pipeline.jobs, 2, SMALL)
    pipeline.run_step(steps.clean_up)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_never_comes_ends_the_step_in_its_time(
    cluster: Cluster, small_model: Any, kind: JobKindName
) -> None:
    run = f"no-node-{kind.lower()}"
    pipeline = cluster.pipeline(run, job_kind=kind)
    open_run(pipeline.context, small_model)
    huge = replace(SMALL, memory="900Gi")
    message = r"within 8 s: .* has no node: .*Insufficient memory.*; add nodes, free some, or lower"
    with pytest.raises(BapoError, match=message):
        steps.train(pipeline.context, pipeline.jobs, 2, huge, start_within_s=8.0)
    pipeline.run_step(steps.clean_up)
