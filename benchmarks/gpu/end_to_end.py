"""`bapo run` on Countdown with the tiny model, through real Postgres, S3 and HTTP.

Engine and trainer share the GPU. The trainer is killed halfway, and the run resumed from its last
checkpoint. Steps per hour are those after the resumption, without evaluations of other versions.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.device import GPU
from benchmarks.gpu.record import Record

ROOT = Path(__file__).resolve().parents[2]
NAME = "end-to-end"
SAMPLE_S = 0.1
"""Seconds between two readings of the device's utilisation."""
START_WITHIN_S = 180.0


def measure(record: Record) -> None:
    steps = 6 if record.toy else 40
    settings = [f"name={NAME}", f"steps={steps}", f"evaluation.every={steps}", "checkpoint.every=2"]
    if record.toy:
        settings += ["rollout.prompts_per_step=8", "optimizer.minibatch_prompts=4"]
        settings += ["task.train_prompts=64", "task.test_prompts=8"]
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        home = Path(directory)
        killed = run_and_kill(home, settings, after=steps // 2)
        record.add("killed", killed)
        done = resume(home, settings, steps)
        summary = json.loads((home / "runs" / NAME / "summary.json").read_text())
        record.add("resumed", {**done, "summary": summary})


class Run:
    """A `bapo run` process, and what its trainer has logged."""

    def __init__(self, home: Path, settings: list[str], *options: str) -> None:
        self._log = home / "home" / "logs" / NAME / "trainer.log"
        self._log.unlink(missing_ok=True)
        self._output = (home / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "run"]
            + [str(ROOT / "examples/countdown.yaml"), *settings, *options, "--port", "0"],
            cwd=home,
            env={**os.environ, "BAPO_HOME": str(home / "home")},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def committed(self) -> list[int]:
        """Returns the steps that this attempt's trainer has committed."""
        try:
            lines = self._log.read_text().splitlines()
        except FileNotFoundError:
            return []
        # The last line may be half written.
        done = [line for line in lines if "step committed" in line and line.endswith("}")]
        return [int(json.loads(line)["step"]) for line in done]

    def until_committed(self, steps: int) -> float:
        """Waits until so many steps are committed; returns the time.

        Raises `RuntimeError` if the run ends first, or after `START_WITHIN_S`.
        """
        deadline = time.monotonic() + START_WITHIN_S
        while len(self.committed()) < steps:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{steps} steps were not committed:\n{self.output()}")
            time.sleep(0.02)
        return time.monotonic()

    def output(self) -> str:
        self._output.flush()
        self._output.seek(0)
        logs = sorted(self._log.parent.glob("*.log")) if self._log.parent.exists() else []
        ends = [f"-- {log.name}\n{log.read_text()[-1_500:]}" for log in logs]
        return "\n".join([self._output.read()[-2_000:], *ends])

    def kill_trainer(self) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if "services.trainer.loop" in process.cmdline():
                process.kill()
                return
        raise RuntimeError(f"there is no trainer to kill:\n{self.output()}")


def run_and_kill(home: Path, settings: list[str], after: int) -> dict[str, Any]:
    """Runs until `after` steps are committed, kills the trainer, and waits until the run gives up.

    Raises `RuntimeError` if the run does not end with an error.
    """
    started = time.monotonic()
    run = Run(home, settings)
    first = run.until_committed(1)
    run.until_committed(after)
    committed = len(run.committed())
    run.kill_trainer()
    killed = time.monotonic()
    code = run.process.wait(60)
    if code == 0:
        raise RuntimeError(f"the run ended without an error:\n{run.output()}")
    return {
        "exit_code": code,
        "first_step_after_s": first - started,
        "committed": committed,
        "stopped_within_s": time.monotonic() - killed,
    }


def resume(home: Path, settings: list[str], last_step: int) -> dict[str, Any]:
    """Resumes the run to its end, which is after `last_step`.

    The device's utilisation is that between the first and the last of these steps; the share of
    idle readings is a lower bound, because each covers a longer time than the pause between two.
    Raises `RuntimeError` if the run fails.
    """
    started = time.monotonic()
    run = Run(home, settings, "--resume")
    first = run.until_committed(1)
    done = run.committed()
    before, last, code = len(done), first, None
    with utilisation() as readings:
        while code is None and done[-1] < last_step:
            time.sleep(0.02)
            code = run.process.poll()
            if len(now := run.committed()) > len(done):
                last, done = time.monotonic(), now
    steps = len(done)
    code = run.process.wait(START_WITHIN_S)
    if code != 0:
        raise RuntimeError(f"the resumed run failed:\n{run.output()}")
    return {
        "first_step_after_s": first - started,
        "steps": steps,
        "seconds_a_step": (last - first) / (steps - before),
        "steps_per_hour": 3_600 * (steps - before) / (last - first),
        "seconds": time.monotonic() - started,
        "device": busy(readings),
    }


@contextmanager
def utilisation() -> Iterator[list[float]]:
    """Yields a list that gets the device's utilisation (0 to 1) several times a second."""
    readings: list[float] = []
    command = shutil.which("nvidia-smi")
    if not GPU or command is None:
        yield readings
        return
    reader = subprocess.Popen(
        [command, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        + ["-lms", str(int(SAMPLE_S * 1e3))],
        stdout=subprocess.PIPE,
        text=True,
    )

    def read() -> None:
        for line in reader.stdout or ():
            readings.append(float(line) / 100)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield readings
    finally:
        reader.terminate()
        thread.join()


def busy(readings: list[float]) -> dict[str, Any] | None:
    """Returns the mean utilisation, and the share of the readings in which nothing ran at all."""
    if not readings:
        return None
    return {
        "readings": len(readings),
        "mean_utilisation": statistics.mean(readings),
        "idle_share": sum(reading == 0 for reading in readings) / len(readings),
    }
