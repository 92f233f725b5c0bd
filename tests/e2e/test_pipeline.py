"""Runs the whole pipeline on this machine: its job fails, it is cancelled, and it continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipelines.local_jobs import MANIFEST, OPERATOR
from pipelines.pytorchjob import job_name
from services.buffer.api.client import BufferClient
from services.stack.stack import running_stack
from tests.e2e.test_run import PATIENCE_S, configuration

STEPS = 29
NAME = "piped"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack of its own, because replicas serve the oldest run, and other tests leave runs."""
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="bapo-home-"))
    yield directory
    shutil.rmtree(directory)


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert process.poll() is None, "the pipeline ended early"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_pipeline_that_fails_and_is_cancelled_trains_every_step_once(
    home: Path, tmp_path: Path, small_model: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(NAME, small_model) | {"steps": STEPS}))
    output = tmp_path / "output"
    command = [sys.executable, "-m", "services.cli", "pipeline", "run-local", str(config)]
    command += ["steps_per_segment=9", "--output", str(output)]
    environment = {**os.environ, "BAPO_HOME": str(home)}
    job = home / "jobs" / job_name("bapo", NAME)

    with running_stack(home, 0) as endpoints:
        client = BufferClient(endpoints.buffer_url, endpoints.token, run=NAME)

        def start(log: Path) -> subprocess.Popen[str]:
            return subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                text=True,
            )

        def committed() -> int:
            return client.run_state().current_step if client.runs() else 0

        first = start(tmp_path / "first.log")
        wait_for(lambda: committed() >= 3, first)
        # The job fails, so the segment's step is retried and creates the job again.
        os.kill(int((job / OPERATOR).read_text()), signal.SIGKILL)
        wait_for(lambda: client.run_state().attempt >= 2, first)
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_S) == 128 + signal.SIGTERM
        state = client.run_state()
        assert state.status == "stopped", (tmp_path / "first.log").read_text()[-3000:]
        assert not job.exists()
        assert not [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if "services.trainer.loop" in (process.info["cmdline"] or [])
            # Not those of the same test of somebody else on this machine.
            and (process.info["environ"] or {}).get("BAPO_BUFFER_URL") == endpoints.buffer_url
        ]

        second = start(tmp_path / "second.log")
        assert second.wait(PATIENCE_S) == 0, (tmp_path / "second.log").read_text()[-3000:]
        state = client.run_state()
        assert (state.status, state.current_step) == ("finished", STEPS)
        assert [step.step for step in client.steps()] == list(range(1, STEPS + 1))
        final = client.evaluations()[-1]
        assert final.version == STEPS + 1

        # A third start finds everything done, and does nothing twice.
        attempt = state.attempt
        third = start(tmp_path / "third.log")
        assert third.wait(PATIENCE_S) == 0, (tmp_path / "third.log").read_text()[-3000:]
        assert client.run_state().attempt == attempt

        # When a step cannot succeed, the last line has the reason.
        mistaken = subprocess.run(
            [*command, "seed=99"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert mistaken.returncode == 1
        assert "with another configuration (seed differ)" in mistaken.stderr.splitlines()[-1]

    log = (tmp_path / "second.log").read_text()
    assert "report   " in log
    assert "every replica serves version" in log
    assert not (home / "jobs" / job_name("bapo", NAME) / MANIFEST).exists()
    artifacts = sorted(output.glob("bapo-*"))[1]
    model = artifacts / "export-model" / "model"
    assert (model / "model.safetensors").is_file()
    assert json.loads((model / "config.json").read_text())["model_type"]
    pages = list(artifacts.glob("**/report/page"))
    assert len(pages) >= 2, "one for every segment"
    assert all("<svg" in page.read_text() for page in pages)
    metrics: dict[str, Any] = json.loads(
        (artifacts / "evaluate" / "executor_output.json").read_text()
    )
    metadata = metrics["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metadata["held_out_accuracy"] == pytest.approx(final.mean_accuracy)
