"""Runs the whole pipeline locally: its job fails, it is cancelled, and a new start resumes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipelines.local_jobs import MANIFEST, OPERATOR
from pipelines.training_job import job_name
from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints, running_stack
from tests.e2e.test_run import TIMEOUT_S, _committed, _wait_until, configuration

NAME = "piped"


@dataclass
class Pipeline:
    """Starts `bapo pipeline run-local` on a stack of its own, because replicas serve the stack's
    oldest run, and the stack that other tests share holds the runs of those tests."""

    home: Path
    directory: Path
    endpoints: Endpoints
    model: Path

    def start(self, log: str, *arguments: str, steps: int | None) -> subprocess.Popen[str]:
        """Starts the pipeline with two segments; its output goes to the file `log`.

        steps: of the run's configuration; None for a fork, which has no file.
        """
        command = [sys.executable, "-m", "services.cli", "pipeline", "run-local"]
        if steps is not None:
            config = self.directory / "config.yaml"
            config.write_text(yaml.safe_dump(configuration(NAME, self.model) | {"steps": steps}))
            command.append(str(config))
        command += ["--segments", "2", "--output", str(self.directory / "output"), *arguments]
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env={**os.environ, "BAPO_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=(self.directory / log).open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, log: str, *arguments: str, steps: int | None) -> str:
        """Runs the pipeline to its end, and returns its output."""
        code = self.start(log, *arguments, steps=steps).wait(TIMEOUT_S)
        assert code == 0, self.log(log)
        return self.log(log)

    def log(self, name: str) -> str:
        return (self.directory / name).read_text()

    @property
    def job(self) -> Path:
        """The directory in which the operator of the training job keeps its state."""
        return self.home / "jobs" / job_name("bapo", NAME)

    def client(self, run: str = NAME) -> BufferClient:
        return BufferClient(self.endpoints.buffer_url, self.endpoints.token, run=run)


@pytest.fixture
def pipeline(tmp_path: Path, small_model: Path) -> Iterator[Pipeline]:
    home = Path(tempfile.mkdtemp(prefix="bapo-home-"))
    with running_stack(home, 0) as endpoints:
        yield Pipeline(home, tmp_path, endpoints, small_model)
    shutil.rmtree(home)


def test_a_pipeline_whose_job_fails_trains_every_step_once(pipeline: Pipeline) -> None:
    steps = 9
    client = pipeline.client()
    imported = ["--import", "model", f"model={pipeline.model}"]
    process = pipeline.start("log", *imported, steps=steps)
    _wait_until(lambda: _committed(client) >= 1, process)
    # When the job fails, KFP's local runner retries the step, which creates the job again.
    os.kill(int((pipeline.job / OPERATOR).read_text()), signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 0, pipeline.log("log")
    state = client.run_state()
    assert (state.status, state.current_step) == ("finished", steps)
    assert state.attempt >= 2
    assert [step.step for step in client.steps()] == list(range(1, steps + 1))
    final = client.evaluations()[-1]
    assert final.version == steps + 1

    log = pipeline.log("log")
    assert f"model {state.config.model.path}\n" in log
    assert state.config.model.path.startswith("store://"), "the imported model is stored"
    assert "report   " in log
    assert "every replica serves version" in log
    assert f"run {NAME} does not exist: it is created" in log
    assert not (pipeline.job / MANIFEST).exists()
    (artifacts,) = (pipeline.directory / "output").glob("bapo-*")
    model = artifacts / "evaluate-and-export" / "model"
    assert (model / "model.safetensors").is_file()
    assert json.loads((model / "config.json").read_text())["model_type"]
    pages = list(artifacts.glob("**/page"))
    assert len(pages) == 2, "the first segment and the evaluation write a report"
    assert all("<svg" in page.read_text() for page in pages)
    metrics: dict[str, Any] = json.loads(
        (artifacts / "evaluate-and-export" / "executor_output.json").read_text()
    )
    metadata = metrics["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metadata["held_out_accuracy"] == pytest.approx(final.mean_accuracy)
    assert metadata.keys() >= {"reward", "loss", "response_length", "seconds"}
    (metrics_file,) = artifacts.glob("evaluate-and-export/metrics")
    assert json.loads(metrics_file.read_text()) == metadata, "Kubeflow previews the file"
    (configuration_file,) = artifacts.glob("prepare-run/configuration")
    assert f"steps: {steps}\n" in configuration_file.read_text()


@pytest.mark.slow
def test_a_pipeline_that_is_cancelled_goes_on_where_it_ended(pipeline: Pipeline) -> None:
    steps = 29
    client = pipeline.client()
    first = pipeline.start("first.log", steps=steps)
    _wait_until(lambda: _committed(client) >= 3, first)
    first.send_signal(signal.SIGTERM)
    assert first.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    state = client.run_state()
    assert state.status == "stopped", pipeline.log("first.log")
    assert not pipeline.job.exists()
    assert not [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "services.trainer.loop" in (process.info["cmdline"] or [])
        # Other users of this machine may run the same test with another stack.
        and (process.info["environ"] or {}).get("BAPO_BUFFER_URL") == pipeline.endpoints.buffer_url
    ]

    pipeline.finish("second.log", steps=steps)
    state = client.run_state()
    assert (state.status, state.current_step) == ("finished", steps)
    assert [step.step for step in client.steps()] == list(range(1, steps + 1))

    # A start after the last step repeats no work: it begins no attempt.
    pipeline.finish("third.log", steps=steps)
    assert client.run_state().attempt == state.attempt

    # When a step fails for good, the last line gives the reason.
    failed = pipeline.start("failed.log", "seed=99", steps=steps)
    assert failed.wait(TIMEOUT_S) == 1
    last_line = pipeline.log("failed.log").splitlines()[-1]
    assert "with another configuration (seed differ)" in last_line


@pytest.mark.slow
def test_a_pipeline_forks_the_run_of_another_one(pipeline: Pipeline) -> None:
    steps = 9
    pipeline.finish("parent.log", steps=steps)
    arguments = ("name=forked", f"fork_of={NAME}", "fork_step=8", "optimizer.weight_decay=0.5")
    said = pipeline.finish("fork.log", *arguments, steps=None)
    assert f"run forked is a fork of {NAME} at step 8" in said
    parent, fork = pipeline.client(), pipeline.client("forked")
    state = fork.run_state()
    assert (state.status, state.current_step) == ("finished", steps)
    assert (state.history.at(8), state.config.optimizer.weight_decay) == (
        parent.run_state().config,
        0.5,
    )
    assert min(span.step for span in fork.spans(1, steps) if span.name == "update") == steps
    weights = [client.weights(steps + 1).manifest_digest for client in (parent, fork)]
    assert weights[0] != weights[1]
    # The same parameters find the fork, which is finished.
    said = pipeline.finish("again.log", *arguments, steps=None)
    assert "run forked is finished, so that nothing is trained" in said
    assert fork.run_state() == state
