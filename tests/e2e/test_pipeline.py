"""Runs the whole pipeline locally: its job fails, it is cancelled, and a new start resumes it."""

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
from pipelines.training_job import job_name
from services.buffer.api.client import BufferClient
from services.stack.stack import running_stack
from tests.e2e.test_run import TIMEOUT_S, configuration

STEPS = 29
NAME = "piped"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a home for a separate stack, because replicas serve the stack's oldest run.

    The stack that other tests share holds the runs of those tests.
    """
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="bapo-home-"))
    yield directory
    shutil.rmtree(directory)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, "the pipeline ended before the condition was met"
        assert time.monotonic() < deadline, f"the condition was not met within {TIMEOUT_S} s"
        time.sleep(0.1)


def test_a_pipeline_that_fails_and_is_cancelled_trains_every_step_once(
    home: Path, tmp_path: Path, small_model: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(NAME, small_model) | {"steps": STEPS}))
    output = tmp_path / "output"
    command = [sys.executable, "-m", "services.cli", "pipeline", "run-local", str(config)]
    command += ["--segments", "2", "--output", str(output)]
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
        wait_until(lambda: committed() >= 3, first)
        # When the job fails, the pipeline retries the segment's step, which creates the job again.
        os.kill(int((job / OPERATOR).read_text()), signal.SIGKILL)
        wait_until(lambda: client.run_state().attempt >= 2, first)
        first.send_signal(signal.SIGTERM)
        assert first.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        state = client.run_state()
        assert state.status == "stopped", (tmp_path / "first.log").read_text()[-3000:]
        assert not job.exists()
        assert not [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if "services.trainer.loop" in (process.info["cmdline"] or [])
            # Other users of this machine may run the same test with another stack.
            and (process.info["environ"] or {}).get("BAPO_BUFFER_URL") == endpoints.buffer_url
        ]

        second = start(tmp_path / "second.log")
        assert second.wait(TIMEOUT_S) == 0, (tmp_path / "second.log").read_text()[-3000:]
        state = client.run_state()
        assert (state.status, state.current_step) == ("finished", STEPS)
        assert [step.step for step in client.steps()] == list(range(1, STEPS + 1))
        final = client.evaluations()[-1]
        assert final.version == STEPS + 1

        # A start after the last step repeats no work: it begins no attempt.
        attempt = state.attempt
        third = start(tmp_path / "third.log")
        assert third.wait(TIMEOUT_S) == 0, (tmp_path / "third.log").read_text()[-3000:]
        assert client.run_state().attempt == attempt

        # When a step fails for good, the last line gives the reason.
        failed = subprocess.run(
            [*command, "seed=99"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert failed.returncode == 1
        assert "with another configuration (seed differ)" in failed.stderr.splitlines()[-1]

    log = (tmp_path / "second.log").read_text()
    assert "report   " in log
    assert "every replica serves version" in log
    assert not (home / "jobs" / job_name("bapo", NAME) / MANIFEST).exists()
    artifacts = sorted(output.glob("bapo-*"))[1]
    model = artifacts / "export-model" / "model"
    assert (model / "model.safetensors").is_file()
    assert json.loads((model / "config.json").read_text())["model_type"]
    pages = list(artifacts.glob("**/page"))
    assert len(pages) == 3, "every segment and the evaluation write a report"
    assert all("<svg" in page.read_text() for page in pages)
    metrics: dict[str, Any] = json.loads(
        (artifacts / "evaluate" / "executor_output.json").read_text()
    )
    metadata = metrics["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metadata["held_out_accuracy"] == pytest.approx(final.mean_accuracy)
