"""Deletes the bucket of the object store while a run trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bapo_core.errors import BapoError
from pipelines import steps
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.common.objectstore import ObjectStore
from services.stack.stack import find_stack
from tests.e2e.test_continue import END, WAIT_S, Pipeline, pipeline
from tests.e2e.test_failures import own_home as own_home
from tests.e2e.test_failures import processes_of
from tests.e2e.test_run import configuration

__all__ = ["pipeline"]

pytestmark = pytest.mark.slow

GONE_WITHIN_S = 120.0
"""Seconds within which a run of this machine ends once its bucket is gone. Starting the
processes and stopping the stack take most of them on a busy machine."""


@pytest.mark.parametrize("pipeline", [1], indirect=True)
@pytest.mark.parametrize(
    "has_come_far",
    [
        # The trainer fails to read its next batch.
        lambda run: run.context.buffer.run_state().current_step > 3,
        # The collector fails to deliver its first groups, for which the trainer waits.
        lambda run: bool(run.context.buffer.replicas()),
    ],
    ids=["while it trains", "before its first rollouts"],
)
def test_a_bucket_that_is_gone_ends_the_step_with_its_name(
    pipeline: Pipeline, has_come_far: Callable[[Pipeline], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "BUCKET_CHECK_INTERVAL_S", 5.0)
    pipeline.last_step(8 * END)
    pipeline.prepare()
    errors = []

    def train() -> None:
        try:
            pipeline.train(8 * END)
        except BapoError as error:
            errors.append(str(error))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    pipeline.wait_until(lambda: has_come_far(pipeline), "the run")
    store = pipeline.context.store
    bucket = store.settings.bucket
    store._client.remove_bucket(bucket_name=bucket)
    thread.join(WAIT_S)
    assert not thread.is_alive(), pipeline.lines
    (error,) = errors
    assert f"object store {store.settings.endpoint}: " in error
    assert f"there is no bucket {bucket}; check its name, or restore it from a backup" in error


@pytest.mark.parametrize(
    "has_come_far",
    [lambda state: state.current_step >= 4, lambda state: state.attempt > 0],
    ids=["while it trains", "before its first step"],
)
def test_a_run_of_this_machine_whose_bucket_is_gone_ends_in_two_minutes(
    own_home: Path,
    small_model: Path,
    tmp_path: Path,
    has_come_far: Callable[[wire.RunState], bool],
) -> None:
    values = configuration("lost", small_model) | {"steps": 300, "evaluation": {"every": 300}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "run", "run.yaml", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "BAPO_HOME": str(own_home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        endpoints = find_stack(own_home)
        if endpoints is not None:
            client = BufferClient(endpoints.buffer_url, endpoints.token, run="lost")
            if any(has_come_far(state) for state in client.runs()):
                break
        time.sleep(0.05)
    store = ObjectStore(endpoints.object_store)
    bucket = store.settings.bucket
    store._client.remove_bucket(bucket_name=bucket)
    deleted = time.monotonic()
    _, errors = process.communicate(timeout=WAIT_S)
    assert time.monotonic() - deleted < GONE_WITHIN_S
    assert process.returncode == 1
    (line,) = errors.strip().splitlines()
    assert re.match(
        rf"error: (trainer|collector) failed .*object store {store.settings.endpoint}: cannot \w+ "
        rf"{bucket}/runs/lost/.*: there is no bucket {bucket}; check its name, or restore it from "
        r"a backup: .*; continue with `bapo run run.yaml name=lost --resume`$",
        line,
    ), line
    assert processes_of(own_home) == []
