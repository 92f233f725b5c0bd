"""Tests the chart and the compiled pipeline on a real cluster with the real training operator.

`make test-cluster` runs them on the cluster that `KUBECONFIG` names. It needs the images of this
version in the cluster or its registry (`BAPO_TEST_REGISTRY`), kubectl, and the Kubeflow training
operator. Kubeflow Pipelines is not needed: `argo.py` runs the steps' pods as it would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bapo_core.config import ConfigHistory
from pipelines.parameters import config_of
from pipelines.steps import segment_ends
from services.cli.main import main
from services.common.objectstore import ObjectStore
from services.model.resolve import TINY_MODEL
from services.stack.stack import Endpoints
from tests.cluster.argo import PipelineRun, StepFailed
from tests.cluster.conftest import HOST, ROOT, Release
from tests.cluster.kubectl import helm, wait_until

pytestmark = pytest.mark.cluster

STEPS = 6
WAIT_S = 300.0


def form(name: str, **fields: Any) -> dict[str, Any]:
    """Returns the fields of Kubeflow's form, with the types that it sends."""
    config = yaml.safe_load((ROOT / "examples/countdown-vllm.yaml").read_text())
    config["optimizer"] |= {"minibatch_prompts": 8}
    config["evaluation"] = {"every": STEPS}
    config["checkpoint"] = {"every": 3}
    return {
        "bapo_run": name,
        "config": config,
        "steps": STEPS,
        "prompts_per_step": 8,
        "group_size": 4,
        "overrides": ["task.test_prompts=20"],
        "gpus_per_worker": 0,
        "cpu_per_worker": "250m",
        "memory_per_worker": "2Gi",
        **fields,
    }


def pipeline(release: Release, name: str, **fields: Any) -> PipelineRun:
    return PipelineRun(release.namespace, release.package, form(name, **fields))


def wait_for_first_step(release: Release, run: PipelineRun) -> None:
    client = release.client(run.name)

    def has_trained() -> bool:
        return run.name in [state.name for state in client.runs() if state.current_step >= 1]

    wait_until(has_trained, "the first step", WAIT_S, run.log)


def wait_for_step(release: Release, run: PipelineRun, step: int) -> None:
    """Waits until an existing run has trained `step` steps, as long as each of them is trained in
    `WAIT_S` seconds."""
    client = release.client(run.name)
    while (trained := client.run_state().current_step) < step:
        wait_until(
            lambda trained=trained: client.run_state().current_step > trained,
            f"step {trained + 1}",
            WAIT_S,
            run.log,
        )


@pytest.fixture
def restored(release: Release) -> Iterator[None]:
    """Gives the release its own values again after a test that changes them."""
    yield
    release.upgrade()


def test_the_release_passes_its_own_test(release: Release) -> None:
    assert "all checks passed" in helm("test", "bapo", "-n", release.namespace.name, "--logs")


def test_a_run_that_fails_is_retried_survives_an_upgrade_and_is_exported(
    release: Release, no_run: None
) -> None:
    """From the form to the exported model: the job cannot start at first, Kubeflow's "Retry" starts
    at the failed step, and the release is upgraded while the job trains."""
    steps = 4 * STEPS  # many enough that it is trained while the release is upgraded
    run = pipeline(release, "first", steps=steps, start_within_minutes=1)
    image = release.namespace.get("configmap", "bapo-connection")["data"]["BAPO_TRAINER_IMAGE"]  # type: ignore[index]
    _set_trainer_image(release, "localhost/bapo/absent:0.3.0")
    with pytest.raises(StepFailed, match=r"has not started within 60 s: .*Image"):
        run.execute()
    client = release.client("first")
    assert client.run_state().status == "stopped", "clean-up stops the run"
    assert not release.jobs(), "clean-up deletes the job"
    assert set(run.succeeded) == {"prepare-run", "clean-up"}

    _set_trainer_image(release, image)
    thread = run.start()
    job = "bapo-first"
    wait_for_first_step(release, run)
    # The steps' pods have KFP's settings; all others are the project's own.
    refused = release.namespace.not_restricted()
    for part in ("buffer", "verifier", "collector", "rollout", "first-worker"):
        assert f"bapo-{part}" not in refused, refused
    uid = release.namespace.get("pytorchjob", job)["metadata"]["uid"]  # type: ignore[index]

    def watch_job() -> set[str]:
        """Returns the uids that the job has until the pipeline has ended."""
        uids = set()
        while thread.is_alive():
            found = release.namespace.get("pytorchjob", job)
            uids |= {found["metadata"]["uid"]} if found else set()
            thread.join(1)
        return uids

    annotations = ("trainer.podAnnotations.upgraded=yes", "collector.podAnnotations.upgraded=yes")
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(watch_job)
        release.upgrade(*annotations)
        jobs = watch.result()
    assert client.run_state().status == "finished", run.logs
    assert jobs == {uid}, "an upgrade must not replace the job of a run"
    trained = (f"step {steps} is trained already", f"step {steps}: reward")
    assert any(line in run.logs["train-2"] for line in trained)
    assert "model in " in run.logs["evaluate-and-export"]
    assert client.evaluations()[-1].version == steps + 1
    assert not release.jobs()

    # Running the same pipeline again repeats no work.
    attempt = client.run_state().attempt
    again = pipeline(release, "first", steps=steps)
    again.execute()
    assert client.run_state().attempt == attempt


def test_the_api_answers_from_outside(release: Release) -> None:
    """Asks what `docs/rest-api.md` offers for reading."""
    assert httpx.get(f"{release.buffer_url}/v1/runs").status_code == 401
    headers = {"Authorization": f"Bearer {release.token}"}

    def get(path: str) -> Any:
        response = httpx.get(f"{release.buffer_url}/v1/{path}", headers=headers)
        assert response.is_success, response.text
        return response.json()

    assert "first" in [run["name"] for run in get("runs")["items"]]
    bins = get("runs/first/difficulty/bins")
    assert sum(bins["bins"]) > 0
    for path in ("steps", "evaluations", "prompts", "batches", "checkpoints", "replicas"):
        assert get(f"runs/first/{path}"), path
    assert get("runs/first/buffers/hard") is not None
    page = httpx.get(f"{release.buffer_url}/")
    assert "<title>" in page.text


def test_a_second_run_waits_and_the_reaper_ends_the_one_whose_workflow_was_deleted(
    release: Release, no_run: None
) -> None:
    # The schedule must not start the reaper before the test does.
    suspended = '{"spec": {"suspend": true}}'
    release.namespace.kubectl("patch", "cronjob", "bapo-reaper", "--patch", suspended)

    def is_idle() -> bool:
        reaper = release.namespace.get("cronjob", "bapo-reaper")
        return reaper is not None and not reaper["status"].get("active")

    wait_until(is_idle, "the end of the reaper", WAIT_S)
    first = pipeline(release, "lost", steps=300)
    first.start()
    client = release.client("lost")

    wait_for_first_step(release, first)
    # This one's configuration is in a ConfigMap of the release's namespace.
    fields = form("next", stored_config="configmap:countdown", steps=3)
    literal = f"--from-literal=config.yaml={yaml.safe_dump(fields.pop('config'))}"
    release.namespace.kubectl("create", "configmap", "countdown", literal)
    second = PipelineRun(release.namespace, release.package, fields)
    thread = second.start()
    line = "waiting: run lost is in front, of 300 steps"
    wait_until(lambda: line in second.log(), "the line of the step's log", WAIT_S, second.log)
    assert release.client("next").run_state().status == "queued"
    assert release.jobs() == {"bapo-lost"}, "no GPUs are held meanwhile"

    first.delete_workflow()
    # Kubernetes deletes the job and the step with their owner. The step stops the run if it has the
    # time; otherwise, the reaper does.
    wait_until(lambda: not release.jobs(), "deletion of the job", WAIT_S)
    release.namespace.kubectl("create", "job", "reap", "--from=cronjob/bapo-reaper")
    wait_until(lambda: client.run_state().status == "stopped", "the reaper", WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive(), second.log()
    assert release.client("next").run_state().status == "finished", second.logs


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_two_workers_train_on_after_one_was_evicted(
    release: Release, no_run: None, restored: None, kind: str
) -> None:
    release.upgrade(f"trainer.jobKind={kind}")
    name = f"two-{kind.lower()}"
    run = pipeline(release, name, workers=2)
    thread = run.start()
    wait_for_first_step(release, run)
    client = release.client(name)
    assert release.namespace.names(kind) == {f"bapo-{name}"}
    attempt = client.run_state().attempt
    workers = release.namespace.names("pods", f"bapo/run={name}")
    assert len(workers) == 2
    release.namespace.evict(max(workers))
    thread.join(WAIT_S)
    assert not thread.is_alive(), run.log()
    assert client.run_state().status == "finished", run.logs
    assert client.run_state().attempt > attempt, "it did not restart"
    assert not release.jobs()


def test_a_trainjob_fails_at_once_and_can_be_suspended(
    release: Release, no_run: None, restored: None
) -> None:
    release.upgrade("trainer.jobKind=TrainJob")
    wrong = pipeline(release, "wrong", overrides=["sync.transport=nccl"])
    message = r"exited with 1 \(Error\): sync.transport is nccl, but the trainer has no GPU; set it"
    with pytest.raises(StepFailed, match=message):
        wrong.execute()
    assert not release.jobs()

    run = pipeline(release, "suspended")
    thread = run.start()
    wait_for_first_step(release, run)

    def suspend(value: bool) -> None:
        change = json.dumps({"spec": {"suspend": value}})
        patch = ["patch", "trainjob", "bapo-suspended", "--type=merge", "-p", change]
        release.namespace.kubectl(*patch)

    def pods() -> set[str]:
        return release.namespace.names("pods", "bapo/run=suspended")

    suspend(True)
    wait_until(lambda: not pods(), "the end of the pods", WAIT_S)
    suspend(False)
    thread.join(WAIT_S)
    assert not thread.is_alive(), run.log()
    assert release.client("suspended").run_state().status == "finished", run.logs


def test_a_second_pipeline_of_the_name_leaves_the_first_one_alone(
    release: Release, no_run: None
) -> None:
    first = pipeline(release, "shared", steps=300)
    thread = first.start()
    wait_for_first_step(release, first)
    client = release.client("shared")
    before = client.run_state()
    job = release.namespace.get("pytorchjob", "bapo-shared")
    fields: dict[str, Any]
    for fields in ({"overrides": ["rolout.group_size=4"]}, {"steps": 9}, {"steps": 300}):
        second = pipeline(release, "shared", **fields)
        refused = f"workflow bapo-test/{first.workflow} trains it; leave bapo_run empty for a new"
        with pytest.raises(StepFailed, match=refused):
            second.execute()
        assert "which is left as it is: running" in second.logs["clean-up"]
        second.delete_workflow()
        same = release.namespace.get("pytorchjob", "bapo-shared")
        assert same is not None
        assert job is not None
        assert same["metadata"]["uid"] == job["metadata"]["uid"]
        state = client.run_state()
        assert (state.status, state.attempt) == ("running", before.attempt)
    assert client.run_state().current_step > before.current_step
    first.terminate()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_run_that_is_terminated_three_times_goes_on_each_time(
    release: Release, no_run: None
) -> None:
    """In the second and third start, *sync* is the first to ask for a turn: it waits for replicas
    that have left the run."""
    client = release.client("continued")
    steps = 80  # many more than are trained while a pod of a step starts
    start = partial(pipeline, release, "continued", steps=steps)
    end, _ = segment_ends(ConfigHistory(config_of(form("continued", steps=steps))), 2)
    trained = 0
    for until in (1, end + 2, end + 9):
        run = start()
        thread = run.start()

        wait_until(lambda: "continued" in {state.name for state in client.runs()}, "it", WAIT_S)
        wait_until(lambda: client.run_state().status == "running", "its turn", WAIT_S, run.log)
        # The start before may have trained more than it was waited for.
        wait_for_step(release, run, max(until, trained + 1))
        run.terminate()
        thread.join(WAIT_S)
        assert not thread.is_alive(), run.log()
        state = client.run_state()
        assert state.status == "stopped", run.logs
        assert state.stopped is not None
        assert state.stopped.by == f"workflow bapo-test/{run.workflow}"
        wait_until(lambda: not release.jobs(), "deletion of the job", WAIT_S)
        trained = state.current_step
    last = start()
    last.execute()
    assert client.run_state().status == "finished", last.logs
    assert f"step {end} is trained already" in last.logs["train"]
    assert "it is continued; it was stopped by workflow" in last.logs["prepare-run"]
    assert [step.step for step in client.steps()] == list(range(1, steps + 1))


def test_a_trainer_without_memory_ends_its_run_with_the_reason(
    release: Release, no_run: None
) -> None:
    run = pipeline(release, "oom", memory_per_worker="100Mi")
    message = r"restarted 4 times .*OOMKilled.*; raise memory_per_worker, which is 100Mi"
    with pytest.raises(StepFailed, match=message):
        run.execute()
    assert not release.jobs()
    stopped = release.client("oom").run_state().stopped
    assert stopped is not None
    assert "OOMKilled" in str(stopped.reason)


def test_an_imported_model_is_trained_by_a_run_without_a_name(
    release: Release, no_run: None, stack: Endpoints, tmp_path: Path
) -> None:
    assert HOST, "set BAPO_TEST_HOST: the model is stored from this machine"
    store = ObjectStore(stack.object_store.model_copy(update={"bucket": "cluster"}))
    for file in TINY_MODEL.iterdir():
        store.put(f"artifacts/model/{file.name}", file.read_bytes())
    package = tmp_path / "import.yaml"
    images = [f"{release.registry}/bapo/{name}:0.3.0" for name in ("service", "trainer")]
    compile_pipeline = ["pipeline", "compile", "--output", str(package), "--import", "model"]
    compile_pipeline += ["--service-image", images[0], "--trainer-image", images[1]]
    main([*compile_pipeline, "--segments", "1"])
    fields = form("", model="minio://cluster/artifacts/model", steps=3)
    run = PipelineRun(release.namespace, package, fields, display_name="My Import")
    run.execute()
    assert run.name == f"my-import-{run.workflow.rpartition('-')[2]}"
    state = release.client(run.name).run_state()
    assert (state.status, state.current_step) == ("finished", 3)
    assert f"model {state.config.model.path}" in run.logs["import-model"]
    assert f"run {run.name} does not exist: it is created" in run.logs["prepare-run"]


def test_a_terminated_run_stops_and_deletes_its_job(release: Release, no_run: None) -> None:
    run = pipeline(release, "ended", steps=300)
    thread = run.start()
    client = release.client("ended")

    wait_for_first_step(release, run)
    run.terminate()
    thread.join(60)
    assert not thread.is_alive()
    assert client.run_state().status == "stopped"
    assert not release.jobs()


def _set_trainer_image(release: Release, image: str) -> None:
    change = {"data": {"BAPO_TRAINER_IMAGE": image}}
    patch = ["patch", "configmap", "bapo-connection", "--type=merge", "-p", json.dumps(change)]
    release.namespace.kubectl(*patch)
