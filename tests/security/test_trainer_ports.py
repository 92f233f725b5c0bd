"""An attacker who reaches the ports on which the processes of a trainer find each other.

Another user of the machine reaches them, and on most networks another machine.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState
from torch.multiprocessing.spawn import ProcessRaisedException

from services.common.process import EXIT_RETRYABLE
from services.trainer import ranks as module
from services.trainer.ranks import init_distributed
from tests.forked import run_ranks

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


def test_no_state_of_the_rendezvous_runs_code(tmp_path: Path, reserved_port: int) -> None:
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
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{reserved_port}",
            "PET_RDZV_CONF": "join_timeout=60,is_host=true",
        },
    )
    try:
        store = connect(reserved_port, launcher)
        state = b64encode(pickle.dumps(hidden(mark))).decode()
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


def take_part(mark: Path, hostile_rank: int, name: str) -> None:
    """Takes part in a collective, in which one rank sends a pickle in place of its value."""
    with init_distributed() as ranks:
        if ranks.rank == hostile_rank:
            data = io.BytesIO()
            torch.save({"loss": Hostile(mark)}, data)
            encoded = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
            module._encode = lambda _: encoded
        if name == "gather":
            ranks.gather_to_main({"loss": 0.5})
        else:
            ranks.from_main(lambda: {"loss": 0.5})


@pytest.mark.parametrize(("hostile_rank", "name"), [(1, "gather"), (0, "broadcast")])
def test_nothing_that_a_rank_sends_runs_code_in_another(
    tmp_path: Path, hostile_rank: int, name: str
) -> None:
    mark = tmp_path / "PWNED"
    with pytest.raises(ProcessRaisedException, match="Weights only load failed"):
        run_ranks(2, take_part, mark, hostile_rank, name)
    assert not mark.exists()
