"""Jobs as processes of this machine: ended, restarted and deleted as the operator would."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.backends import JobState, ensure, remove
from pipelines.localjobs import OPERATOR, LocalBackend
from pipelines.pytorchjob import Resources, build_job, job_name
from tests.unit.pipelines.test_pytorchjob import DEPLOYMENT

NAME = job_name("bapo", "local")
WITHIN_S = 300.0


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    monkeypatch.setenv("BAPO_CONNECTION", DEPLOYMENT.connection)
    monkeypatch.setenv("BAPO_TOKEN_SECRET", DEPLOYMENT.token_secret)
    monkeypatch.setenv("BAPO_S3_SECRET", DEPLOYMENT.s3_secret)
    return LocalBackend(tmp_path)


def job(program: str, *, workers: int = 1) -> dict[str, Any]:
    """One whose container runs a Python program instead of the trainer."""
    found = build_job("local", DEPLOYMENT, Resources(workers=workers, gpus=0))
    template = found["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["spec"]["containers"][0] |= {"command": ["python", "-c", program], "args": []}
    return found


def end_of(backend: LocalBackend) -> JobState:
    deadline = time.monotonic() + WITHIN_S
    while True:
        state = backend.state(NAME)
        assert state is not None
        if state.over:
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def test_success_and_the_operators_variables(backend: LocalBackend, tmp_path: Path) -> None:
    names = ["PET_NNODES", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_MAX_RESTARTS", "BAPO_RUN"]
    assert backend.create(job(f"import os; print(*[os.environ[n] for n in {names}])"))
    assert not backend.create(job("")), "it is there"
    assert end_of(backend).phase == "succeeded"
    log = (tmp_path / NAME / "worker-0.log").read_text()
    assert log.split() == ["1:1", "c10d", NAME, "0", "local"]
    assert backend.jobs() == {NAME: "local"}


def test_a_code_below_128_ends_the_job_with_the_last_error(backend: LocalBackend) -> None:
    said = '{"level": "error", "message": "no such model"}'
    backend.create(job(f"import sys; print({said!r}); sys.exit(1)"))
    state = end_of(backend)
    assert state.phase == "failed"
    assert "ended with 1" in state.reason
    assert "no such model" in state.reason


@pytest.mark.parametrize("code", [138, -signal.SIGKILL])
def test_other_codes_start_it_again(backend: LocalBackend, tmp_path: Path, code: int) -> None:
    fail = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    backend.create(
        job(
            "import os, pathlib, sys\n"
            "tries = pathlib.Path(os.environ['BAPO_SCRATCH']) / 'tries'\n"
            "with tries.open('a') as file: file.write('x')\n"
            f"if tries.read_text() != 'xxx': {fail}\n"
        )
    )
    assert end_of(backend).phase == "succeeded"
    assert (tmp_path / NAME / "volumes-0/scratch/tries").read_text() == "xxx"


def test_restarts_have_an_end(backend: LocalBackend) -> None:
    failing = job("import sys; sys.exit(138)")
    failing["spec"]["runPolicy"]["backoffLimit"] = 2
    backend.create(failing)
    assert "2 restarts did not mend it" in end_of(backend).reason


def test_deleting_a_job_ends_every_process_of_it(backend: LocalBackend, tmp_path: Path) -> None:
    waiting = (
        "import os, pathlib, time\n"
        "(pathlib.Path(os.environ['BAPO_SCRATCH']) / str(os.getpid())).touch()\n"
        "time.sleep(600)\n"
    )
    backend.create(job(waiting, workers=2))
    found: list[Path] = []
    deadline = time.monotonic() + WITHIN_S
    while len(found) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        found = list((tmp_path / NAME).glob("volumes-*/scratch/*"))
    remove(backend, NAME)
    assert backend.state(NAME) is None
    assert not any(psutil.pid_exists(int(path.name)) for path in found)


def test_a_job_whose_processes_were_killed_has_failed_and_is_replaced(
    backend: LocalBackend, tmp_path: Path
) -> None:
    backend.create(job("import time; time.sleep(600)"))
    os.kill(int((tmp_path / NAME / OPERATOR).read_text()), signal.SIGKILL)
    state = end_of(backend)
    assert state.phase == "failed"
    assert "its processes are gone" in state.reason
    ensure(backend, job("print('again')"))
    assert end_of(backend).phase == "succeeded"


def test_a_reference_to_nothing_fails_the_job(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_S3_SECRET", "another")
    backend.create(job("print('never')"))
    assert "'bapo-s3', which does not exist" in end_of(backend).reason
