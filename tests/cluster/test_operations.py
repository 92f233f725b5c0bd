"""Tests what operators do to a release and its nodes while a run trains.

`make test-cluster-all` runs them.
"""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Release
from tests.cluster.kubectl import helm, kubectl, wait_until
from tests.cluster.test_cluster import WAIT_S, pipeline, wait_for_first_step

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_replicas_exist_only_while_there_is_a_run(release: Release, no_run: None) -> None:
    release.upgrade("rollout.scaleToZero.enabled=true", "rollout.scaleToZero.idleMinutes=1")

    def replicas() -> set[str]:
        return {name for name in release.namespace.names("pods") if name.startswith("bapo-rollout")}

    wait_until(lambda: not replicas(), "scaling to zero", WAIT_S)
    run = pipeline(release, "scaled", steps=3)
    run.execute()
    assert release.client("scaled").run_state().status == "finished"
    release.upgrade("rollout.scaleToZero.enabled=true", "rollout.scaleToZero.idleMinutes=1")
    wait_until(lambda: not replicas(), "scaling to zero", WAIT_S)
    release.upgrade()
    wait_until(replicas, "the replicas of a release that does not scale", WAIT_S)


def test_an_evicted_step_is_repeated_and_its_job_goes_on(release: Release, no_run: None) -> None:
    run = pipeline(release, "evicted")
    thread = run.start()
    wait_for_first_step(release, run)
    job = release.namespace.get("pytorchjob", "bapo-evicted")
    step = run.running
    assert job is not None
    assert step is not None
    release.namespace.evict(step)
    wait_until(lambda: run.running not in (step, None), "the next attempt", WAIT_S, run.log)
    same = release.namespace.get("pytorchjob", "bapo-evicted")
    assert same is not None
    assert same["metadata"]["uid"] == job["metadata"]["uid"]
    thread.join(WAIT_S)
    assert not thread.is_alive(), run.log()
    assert release.client("evicted").run_state().status == "finished", run.logs


def test_a_drained_node_ends_no_run(release: Release, no_run: None) -> None:
    """On a cluster of one node everything ends at once, the buffer service included."""
    run = pipeline(release, "drained")
    thread = run.start()
    wait_for_first_step(release, run)
    pod = release.namespace.get("pod", "bapo-drained-worker-0")
    assert pod is not None
    node = pod["spec"]["nodeName"]
    selector = "--pod-selector=app.kubernetes.io/part-of=bapo"
    options = ["--force", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s"]
    try:
        kubectl("drain", node, selector, *options)
    finally:
        kubectl("uncordon", node)
    release.connect()
    thread.join(3 * WAIT_S)
    assert not thread.is_alive(), run.log()
    assert release.client("drained").run_state().status == "finished", run.logs


def test_a_rollback_and_a_reinstallation_keep_runs_and_token(
    release: Release, no_run: None
) -> None:
    before = {run.name for run in release.client("").runs()}
    release.upgrade("image.rollout=bapo/absent", wait=False)
    helm("rollback", "bapo", "-n", release.namespace.name, "--wait")
    assert "all checks passed" in helm("test", "bapo", "-n", release.namespace.name, "--logs")
    helm("uninstall", "bapo", "-n", release.namespace.name, "--wait")
    release.install()
    release.connect()
    assert {run.name for run in release.client("").runs()} == before
