"""An attacker who reaches the ports on which the processes of a trainer find each other.

Another user of the machine reaches them, and on most networks another machine.
"""

from __future__ import annotations

import builtins
import io
import os
import pickle
import random
import subprocess
import sys
import time
import traceback
from base64 import b64encode
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed import DistBackendError, DistError, TCPStore, distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState
from torch.multiprocessing.spawn import ProcessRaisedException

from bapo_core.errors import BapoError, TransientError
from services.common.process import EXIT_RETRYABLE
from services.trainer import ranks as module
from services.trainer.checkpoint import Checkpointer
from services.trainer.ranks import init_distributed
from services.trainer.save_plans import PlanPickler, PlanUnpickler, RankError
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


class HostilePickler:
    """Writes a hostile pickle in place of each object."""

    mark: Path

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def dump(self, _: object) -> None:
        pickle.dump(Hostile(self.mark), self._file)


class KeepsNothing:
    """Stands in for the object store, of which a rank's part of a checkpoint needs little."""

    def put_contents(self, prefix: str, files: dict[str, Path]) -> dict[str, str]:
        assert files, f"rank without a file of {prefix}"
        return dict.fromkeys(files, "digest")

    def put_manifest(self, prefix: str, files: dict[str, str]) -> str:
        return f"manifest of {sorted(files)} in {prefix}"


class Keeps:
    """Stands in for the buffer service, and keeps the recorded checkpoint in a file."""

    run, attempt = "run", 1

    def __init__(self, kept: Path) -> None:
        self._kept = kept

    def record_checkpoint(self, step: int, digest: str) -> None:
        self._kept.write_text(f"{step}: {digest}")


class OwnError(Exception):
    """An error of a class that only the rank knows that raises it, with what no pickle holds."""


FAILURES: dict[str, Callable[[], BaseException]] = {
    "OSError: [Errno 28] No space left on device": lambda: OSError(28, "No space left on device"),
    "torch.OutOfMemoryError: 3 GiB": lambda: torch.OutOfMemoryError("3 GiB"),
    "torch.distributed.DistBackendError: lost": lambda: DistBackendError("lost"),
    "_pickle.PicklingError: no": lambda: pickle.PicklingError("no"),
    "tests.security.test_trainer_ports.OwnError: <function": lambda: OwnError(lambda: None),
}
"""Errors that a rank may meet while it saves a checkpoint, by their texts."""


def save_checkpoint(
    directory: Path, hostile_rank: int | None, failing_rank: int | None = None, failure: str = ""
) -> None:
    """Saves a checkpoint; one rank may send hostile pickles, or fail to write its file."""
    with init_distributed() as ranks:
        if ranks.rank == hostile_rank:
            HostilePickler.mark = directory / "PWNED"
            distributed_c10d._pickler = HostilePickler  # type: ignore[misc, assignment]
        if ranks.rank == failing_rank:

            def fail(*_: object) -> None:
                raise FAILURES[failure]()

            FileSystem.create_stream = fail  # type: ignore[assignment, method-assign]
        model = nn.Linear(8, 8)
        model(torch.ones(8)).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        checkpointer = Checkpointer(
            cast(Any, Keeps(directory / "recorded")),
            cast(Any, KeepsNothing()),
            scratch=directory,
            ranks=ranks,
        )
        checkpointer.save(3, {"critic": (model, {"optimizer": optimizer})})
        try:
            checkpointer.settle()
        except TransientError as error:
            (directory / f"failed-{ranks.rank}").write_text(str(error))


@pytest.mark.parametrize("hostile_rank", [0, 1])
def test_no_plan_of_a_checkpoint_runs_code(tmp_path: Path, hostile_rank: int) -> None:
    with pytest.raises(ProcessRaisedException, match=r"rank of the trainer has sent posix\.system"):
        run_ranks(2, save_checkpoint, tmp_path, hostile_rank)
    assert not (tmp_path / "PWNED").exists()
    assert not (tmp_path / "recorded").exists()


def test_ranks_save_a_checkpoint_together(tmp_path: Path) -> None:
    run_ranks(2, save_checkpoint, tmp_path, None)
    recorded = (tmp_path / "recorded").read_text()
    assert recorded.startswith("3: ")
    assert "__0_0.distcp" in recorded
    assert "__1_0.distcp" in recorded


@pytest.mark.parametrize(
    ("failing_rank", "failure"), [(number % 2, name) for number, name in enumerate([*FAILURES] * 2)]
)
def test_each_rank_hears_why_another_could_not_save(
    tmp_path: Path, failing_rank: int, failure: str
) -> None:
    run_ranks(2, save_checkpoint, tmp_path, None, failing_rank, failure)
    for rank in range(2):
        said = (tmp_path / f"failed-{rank}").read_text()
        assert f"after step 3 could not be saved (rank {failing_rank}: {failure}" in said
        assert "\n" not in said


def exchanged(value: Any) -> Any:
    """Returns what another rank gets."""
    data = io.BytesIO()
    PlanPickler(data).dump(value)
    return PlanUnpickler(io.BytesIO(data.getvalue())).load()


ERRORS = [
    kind
    for module in (builtins, pickle, subprocess, torch, torch.distributed)
    for kind in vars(module).values()
    if issubclass(type(kind), type) and issubclass(kind, BaseException)
]


@pytest.mark.parametrize("kind", random.Random(52).sample(ERRORS, 30))
def test_an_error_of_any_class_is_sent_as_its_text(kind: type[BaseException]) -> None:
    error = kind.__new__(kind, "a", [KeyError("b")])
    failures = {1: (error, traceback.StackSummary.from_list([]))}
    got = exchanged(CheckpointException("write", failures))
    assert isinstance(got, CheckpointException)
    reason, _ = got.failures[1]
    assert type(reason) is RankError
    assert type(error).__qualname__ in str(reason)


def test_a_rank_logs_its_own_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise OwnError("lost")
    except OwnError as error:
        got = exchanged(error)
    (record,) = caplog.records
    assert "OwnError: lost" in record.getMessage()
    assert record.exc_info
    assert isinstance(record.exc_info[1], OwnError)
    exchanged(got)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("member", [*WriteItemType, *_MEM_FORMAT_ENCODING])
def test_members_of_enumerations_are_sent_without_getattr(
    member: Enum, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's Python 3.11.2 writes a member as a call of `getattr`."""
    as_in_debian = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(type(member), "__reduce_ex__", as_in_debian)
    assert exchanged({"kind": member})["kind"] is member


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (WriteItemType, "TENSOR"),
        (WriteItemType, "__class__"),
        (WriteItemType, "__init_subclass__"),
        (SavePlan, "__init__"),
        (torch.Size, "__reduce__"),
    ],
)
def test_a_plan_calls_no_getattr(value: Any, name: str) -> None:
    class Reached:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (value, name)

    with pytest.raises(pickle.UnpicklingError, match=r"has sent builtins\.getattr"):
        PlanUnpickler(io.BytesIO(pickle.dumps(Reached()))).load()


STANDARD = [(name, each) for name in ("os", "subprocess") for each in dir(sys.modules[name])]
GADGETS = [
    *[("builtins", name) for name in ("eval", "exec", "getattr", "open", "__import__", "type")],
    *[("torch", name) for name in ("load", "float32.__reduce__", "hub", "Tensor", "serialization")],
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
    ("torch.serialization", "load"),
    ("pathlib", "os.system"),
    ("traceback", "linecache"),
    *random.Random(51).sample(STANDARD, 20),
]


@pytest.mark.parametrize(("module_name", "name"), GADGETS)
def test_a_plan_names_no_function_but_its_own(module_name: str, name: str) -> None:
    """A protocol that reads dotted names must not reach what a module of plans imports."""
    data = b"\x80\x04" + b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module_name, name)
    )
    with pytest.raises(pickle.UnpicklingError, match="a rank of the trainer has sent"):
        PlanUnpickler(io.BytesIO(data + pickle.STACK_GLOBAL + pickle.STOP)).load()


@pytest.mark.parametrize("name", ["_pickler", "_unpickler"])
def test_a_pytorch_that_exchanges_objects_in_another_way_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(distributed_c10d, name)
    with pytest.raises(BapoError, match="install PyTorch"), init_distributed():
        pass
