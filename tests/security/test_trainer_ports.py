"""An attacker who reaches the ports on which the processes of a trainer find each other.

Another user of the machine reaches them, and on most networks another machine.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from services.common.process import EXIT_RETRYABLE
from services.stack.supervisor import free_ports

ROOT = Path(__file__).parents[2]


class Hostile:
    """A value whose pickle runs a command where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


def hidden(mark: Path) -> _RendezvousState:
    """Returns a state with a hostile field."""
    state = _RendezvousState()
    state.deadline = Hostile(mark)  # type: ignore[assignment]
    return state


def connect(port: int, launcher: subprocess.Popen[str]) -> TCPStore:
    """Returns a client of the rendezvous' store, once the launcher has opened its port."""
    while True:
        assert launcher.poll() is None, launcher.communicate()[1]
        try:
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        except DistError:
            time.sleep(0.1)


@pytest.mark.parametrize("make", [Hostile, hidden], ids=["whole state", "field"])
def test_no_state_of_the_rendezvous_runs_code(tmp_path: Path, make: Any) -> None:
    (port,) = free_ports(1)
    mark = tmp_path / "PWNED"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "services.trainer.launch", "--nproc-per-node", "1"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "PET_NNODES": "2:2",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ID": "job",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_RDZV_CONF": "join_timeout=60,is_host=true",
        },
    )
    try:
        store = connect(port, launcher)
        state = b64encode(pickle.dumps(make(mark))).decode()
        while launcher.poll() is None:  # The launcher writes its own state as well.
            try:
                store.set("torch.rendezvous.job", state)
            except DistError:
                break
            time.sleep(0.05)
        _, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    assert not mark.exists()
    assert launcher.returncode == EXIT_RETRYABLE, errors
    assert "a foreign process has reached its port" in errors
