"""Tests that jobs run, restart and are deleted as processes as the training operator would."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.backends import JobState, ensure_job, remove_job
from pipelines.local_jobs import MANIFEST, OPERATOR, STATE, LocalBackend
from pipelines.training_job import Resources, TrainingJob, job_name
from tests.unit.pipelines.test_training_job import DEPLOYMENT

NAME = job_name("bapo", "local")
WITHIN_S = 300.0


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    monkeypatch.setenv("BAPO_CONNECTION", DEPLOYMENT.connection)
    monkeypatch.setenv("BAPO_TOKEN_SECRET", DEPLOYMENT.token_secret)
    monkeypatch.setenv("BAPO_S3_SECRET", DEPLOYMENT.s3_secret)
    monkeypatch.setenv("BAPO_TOKEN", "of the step")
    monkeypatch.setenv("BAPO_TRAINER_TOKEN", "trainers-token")
    return LocalBackend(tmp_path)


@dataclass(frozen=True, slots=True)
class ProgramJob(TrainingJob):
    """A job whose container runs a Python program instead of the trainer."""

    program: str = ""

    def pod_template(self, container: str, variables: dict[str, str]) -> dict[str, Any]:
        template = TrainingJob.pod_template(self, container, variables)
        template["spec"]["containers"][0] |= {"command": ["python", "-c", self.program], "args": []}
        return template


def job(program: str, *, workers: int = 1) -> TrainingJob:
    return ProgramJob("local", DEPLOYMENT, Resources(workers=workers, gpus=0), program=program)


def final_state(backend: LocalBackend) -> JobState:
    deadline = time.monotonic() + WITHIN_S
    while True:
        state = backend.state(NAME)
        assert state is not None
        if state.finished:
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def test_a_job_succeeds_with_the_operators_variables(backend: LocalBackend, tmp_path: Path) -> None:
    names = ["BAPO_TOKEN", "PET_NNODES", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_MAX_RESTARTS"]
    names += ["BAPO_RUN"]
    assert backend.create(job(f"import os; print(*[os.environ[n] for n in {names}])"))
    assert not backend.create(job("")), "it exists"
    assert final_state(backend).phase == "succeeded"
    log = (tmp_path / NAME / "worker-0.log").read_text()
    assert log.split() == ["trainers-token", "1:1", "c10d", NAME, "0", "local"]
    assert backend.jobs() == {NAME: "local"}


def test_a_code_below_128_ends_the_job_with_the_last_error(backend: LocalBackend) -> None:
    line = '{"level": "error", "message": "no such model"}'
    backend.create(job(f"import sys; print({line!r}); print('a later line'); sys.exit(1)"))
    state = final_state(backend)
    assert state.phase == "failed"
    assert state.reason.startswith("worker-0 exited with 1: no such model (log: ")


@pytest.mark.parametrize("code", [138, -signal.SIGKILL])
def test_other_codes_restart_the_workers(backend: LocalBackend, tmp_path: Path, code: int) -> None:
    fail = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    backend.create(
        job(
            "import os, pathlib, sys\n"
            "tries = pathlib.Path(os.environ['BAPO_SCRATCH']) / 'tries'\n"
            "with tries.open('a') as file: file.write('x')\n"
            f"if tries.read_text() != 'xxx': {fail}\n"
        )
    )
    assert final_state(backend).phase == "succeeded"
    assert (tmp_path / NAME / "volumes-0/scratch/tries").read_text() == "xxx"


def test_restarts_are_limited(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.pytorchjob.MAX_RESTARTS", 2)
    failing = job(
        "import os, pathlib, sys\n"
        "tries = pathlib.Path(os.environ['BAPO_SCRATCH']) / 'tries'\n"
        "with tries.open('a') as file: file.write('x')\n"
        "sys.exit(138)\n"
    )
    backend.create(failing)
    assert "2 restarts did not fix it" in final_state(backend).reason
    assert (tmp_path / NAME / "volumes-0/scratch/tries").read_text() == "xxx"


@pytest.mark.parametrize("file", [MANIFEST, STATE])
@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}"])
def test_a_job_whose_files_a_power_loss_damaged_has_failed_and_is_replaced(
    backend: LocalBackend, tmp_path: Path, file: str, text: str
) -> None:
    backend.create(job("pass"))
    assert final_state(backend).phase == "succeeded"
    (tmp_path / NAME / file).write_text(text)
    state = backend.state(NAME)
    assert state is not None
    assert (state.phase, f"{NAME}/{file} is damaged" in state.reason) == ("failed", True)
    assert backend.jobs() == ({} if file == MANIFEST else {NAME: "local"})
    ensure_job(backend, job("pass"), log=print)
    assert final_state(backend).phase == "succeeded"


def test_the_state_that_a_newer_version_recorded_is_read(
    backend: LocalBackend, tmp_path: Path
) -> None:
    backend.create(job("pass"))
    state, path = final_state(backend), tmp_path / NAME / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_newer_version": True}))
    assert backend.state(NAME) == state


def test_removing_a_job_stops_all_of_its_processes(backend: LocalBackend, tmp_path: Path) -> None:
    waiting = (
        "import os, pathlib, time\n"
        "(pathlib.Path(os.environ['BAPO_SCRATCH']) / str(os.getpid())).touch()\n"
        "time.sleep(600)\n"
    )
    backend.create(job(waiting, workers=2))
    pids: list[Path] = []
    deadline = time.monotonic() + WITHIN_S
    while len(pids) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        pids = list((tmp_path / NAME).glob("volumes-*/scratch/*"))
    remove_job(backend, NAME, log=print)
    assert backend.state(NAME) is None
    assert not any(psutil.pid_exists(int(path.name)) for path in pids)


def test_a_job_whose_operator_was_killed_has_failed_and_is_replaced(
    backend: LocalBackend, tmp_path: Path
) -> None:
    backend.create(job("import time; time.sleep(600)"))
    os.kill(int((tmp_path / NAME / OPERATOR).read_text()), signal.SIGKILL)
    state = final_state(backend)
    assert state.phase == "failed"
    assert "its operator was killed" in state.reason
    ensure_job(backend, job("print('again')"), log=print)
    assert final_state(backend).phase == "succeeded"


def test_a_reference_to_a_missing_secret_fails_the_job(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_S3_SECRET", "another")
    backend.create(job("print('never')"))
    assert "'bapo-s3', which does not exist" in final_state(backend).reason
