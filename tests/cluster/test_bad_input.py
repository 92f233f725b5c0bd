"""Tests what a person sees who starts the pipeline with what cannot work: each run ends within its
stated time (docs/deploy.md), and the step's own log ends with one line that says what, where and
what to do.

`make test-cluster` runs them, with the images of this version. `test_one_name.py` has what needs no
images, and `test_cluster.py` a trainer without memory and another's name.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli.main import main
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.cluster.argo import PipelineRun, StepFailed
from tests.cluster.conftest import HOST, Release
from tests.cluster.test_cluster import form, pipeline, wait_for_first_step

pytestmark = pytest.mark.cluster

OVERHEAD_S = 180.0
"""Seconds for the pods of the steps before, and of clean-up, on a busy machine of two cores."""


def fail(run: PipelineRun, step: str, message: str, within_s: float = 0.0) -> None:
    """Executes a run whose step `step` fails, within `within_s` and what its pods take, with a last
    line of its log that matches `message`."""
    began = time.monotonic()
    with pytest.raises(StepFailed, match=rf"{step}: "):
        run.execute()
    assert time.monotonic() - began < within_s + OVERHEAD_S
    check_last_line(run, step, message)


def check_last_line(run: PipelineRun, step: str, message: str) -> None:
    last = run.logs[step].strip().splitlines()[-1]
    assert re.match(f"error: {message}", last), last


@contextmanager
def connection(release: Release, **changes: str) -> Iterator[None]:
    """Changes keys of the release's connection ConfigMap meanwhile."""
    found = release.namespace.get("configmap", "bapo-connection")
    assert found is not None
    before = {key: found["data"][key] for key in changes}

    def patch(data: dict[str, str]) -> None:
        change = json.dumps({"data": data})
        release.namespace.kubectl("patch", "configmap", "bapo-connection", "-p", change)

    patch(changes)
    try:
        yield
    finally:
        patch(before)


@pytest.mark.parametrize(("name", "valid"), [("My Run", "my-run"), ("COUNTDOWN", "countdown")])
def test_a_name_with_capitals_or_spaces_ends_in_the_first_step(
    release: Release, no_run: None, name: str, valid: str
) -> None:
    run = pipeline(release, name)
    rule = "a name has lower-case letters, digits and hyphens, begins with a letter, and has at mo"
    fail(run, "prepare-run", f"bapo_run is '{name}': {rule}.*give for example '{valid}', or leave ")
    assert f"no run was created: '{name}' is no valid name" in run.logs["clean-up"]


def test_a_step_without_its_secret_ends_at_once(
    release: Release, no_run: None, tmp_path: Path
) -> None:
    package = tmp_path / "pipeline.yaml"
    images = [f"{release.registry}/bapo/{name}:0.3.0" for name in ("service", "trainer")]
    command = ["pipeline", "compile", "--output", str(package), "--segments", "1"]
    command += ["--service-image", images[0], "--trainer-image", images[1]]
    main([*command, "--name", "token_secret=absent"])
    run = PipelineRun(release.namespace, package, form("no-token"))
    with pytest.raises(StepFailed, match="clean-up: "):  # which lacks the Secret, too
        run.execute()
    message = "environment: BAPO_TOKEN is not set: .*; the pipeline must be compiled with the names"
    for step in ("prepare-run", "clean-up"):
        check_last_line(run, step, message)


def test_a_job_without_its_secret_names_it(release: Release, no_run: None) -> None:
    run = pipeline(release, "no-secret", start_within_minutes=1)
    message = (
        r"job bapo-no-secret has not started within 60 s: bapo-no-secret-worker-0: "
        r'CreateContainerConfigError: secret "absent" not found; create what it names in the '
        f"namespace {release.namespace.name}, or correct the chart's values"
    )
    with connection(release, BAPO_TOKEN_SECRET="absent"):
        fail(run, "train", message, within_s=60)
    assert not release.jobs()


@pytest.mark.parametrize(
    ("cores", "reason"),
    [
        # The node has fewer.
        ("50", "bapo-no-node-50-worker-0 has no node: .*Insufficient cpu.*; add nodes, free some"),
        # The quota of the tests' namespace is smaller.
        (
            "500",
            "FailedCreatePod: .*exceeded quota: profile.*; raise the ResourceQuota of the name",
        ),
    ],
)
def test_a_node_that_never_comes_names_what_is_asked_for(
    release: Release, no_run: None, cores: str, reason: str
) -> None:
    run = pipeline(release, f"no-node-{cores}", start_within_minutes=1, cpu_per_worker=cores)
    started = f"job bapo-no-node-{cores} has not started within 60 s: "
    remedy = ".* lower gpus_per_worker, cpu_per_worker or memory_per_worker"
    fail(run, "train", started + reason + remedy, within_s=60)
    assert not release.jobs()


def test_a_bucket_that_is_gone_in_the_middle_is_named(
    release: Release, no_run: None, stack: Endpoints
) -> None:
    assert HOST, "set BAPO_TEST_HOST: the bucket is deleted from this machine"
    store = ObjectStore(stack.object_store.model_copy(update={"bucket": "cluster"}))
    run = pipeline(release, "no-bucket", steps=300)
    thread = run.start()
    wait_for_first_step(release, run)
    store._client.remove_bucket(bucket_name="cluster")
    try:
        thread.join(60 + OVERHEAD_S)
    finally:
        store.ensure_bucket()  # for the tests that follow
    assert not thread.is_alive(), run.log()
    last = run.logs["train"].strip().splitlines()[-1]
    assert last.startswith("error: "), last
    assert f"object store http://{HOST}:" in last
    assert "there is no bucket cluster; check its name, or restore it from a backup" in last
    stopped = release.client("no-bucket").run_state().stopped
    assert stopped is not None
    assert "there is no bucket cluster" in str(stopped.reason)
    assert not release.jobs()
