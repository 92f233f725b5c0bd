"""How a process ends says whether starting it again is of use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import BapoError, ServiceUnavailable
from services.common.objectstore import ObjectStoreError, ObjectStoreUnavailable
from services.common.process import EXIT_AGAIN, run_until_error
from services.local.supervisor import free_ports
from services.trainer.update import NonFiniteLoss

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BapoError("wrong configuration"), 1),
        (ObjectStoreError("damaged"), 1),
        (ObjectStoreUnavailable("away"), EXIT_AGAIN),
        (ServiceUnavailable("away"), EXIT_AGAIN),
        (NonFiniteLoss("nan"), EXIT_AGAIN),
        (RuntimeError("connection closed by peer"), EXIT_AGAIN),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    def work() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_until_error(work)
    assert caught.value.code == code


def test_the_launcher_ends_as_the_first_process_that_failed() -> None:
    """A trainer that is told nothing does not know its run: no restart mends that."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.trainer.launch", "--standalone"),
            *("--nproc-per-node", "1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )
    assert done.returncode == 1, done.stderr
    assert "BAPO_SCRATCH is not set" in done.stdout + done.stderr


@pytest.mark.parametrize("endpoint", ["reachable", "nowhere"])
def test_workers_that_do_not_find_each_other_are_started_again(endpoint: str) -> None:
    """A peer waits for its node, or the one that hosts the rendezvous was evicted."""
    (port,) = free_ports(1) if endpoint == "reachable" else (1,)
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer.launch", "--nproc-per-node", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "PET_NNODES": "2:2",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": "job",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_RDZV_CONF": f"join_timeout=2,read_timeout=2,is_host={endpoint == 'reachable'}",
        },
    )
    assert done.returncode == EXIT_AGAIN, done.stderr
    assert "the workers do not find each other" in done.stderr
