"""A communicator is destroyed after a broadcast and aborted after an error, and never both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.trainer import nccl
from services.trainer.nccl import ID_BYTES, NcclCommunicator, NcclError

UNIQUE_ID = bytes(ID_BYTES)


class FakeLibrary:
    """Stands in for libnccl: records calls, and makes those named in `failing` fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[str] = []

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            if function == "ncclGetErrorString":
                return b"unhandled system error"
            self.calls.append(function)
            return 2 if function in self.failing else 0

        return call


@pytest.fixture
def make_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[FakeLibrary, Callable[[], None]], NcclCommunicator]:
    """Makes a communicator on a machine without GPU, whose broadcast is a given function."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def make(library: FakeLibrary, broadcast: Callable[[], None]) -> NcclCommunicator:
        monkeypatch.setattr(nccl, "library", lambda: library)
        communicator = NcclCommunicator()
        monkeypatch.setattr(communicator, "_broadcast", lambda *_: broadcast())
        return communicator

    return make


def test_a_communicator_is_destroyed_after_the_broadcast(make_communicator: Any) -> None:
    library = FakeLibrary()
    communicator = make_communicator(library, lambda: None)
    communicator.send(UNIQUE_ID, 1, [])
    communicator.abort(UNIQUE_ID)
    assert library.calls == ["ncclCommInitRank", "ncclCommDestroy"]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), NcclError("ncclBroadcast: failed")])
@pytest.mark.parametrize("failing", [(), ("ncclCommAbort",)])
def test_a_communicator_is_aborted_after_an_error(
    make_communicator: Any, error: Exception, failing: tuple[str, ...]
) -> None:
    """Destroying it would wait for operations that the receivers never complete."""

    def broadcast() -> None:
        raise error

    library = FakeLibrary(*failing)
    communicator = make_communicator(library, broadcast)
    with pytest.raises(type(error)) as caught:
        communicator.send(UNIQUE_ID, 1, [])
    assert caught.value is error
    communicator.abort(UNIQUE_ID)
    assert library.calls == ["ncclCommInitRank", "ncclCommAbort"]


@pytest.mark.parametrize("broadcast_fails", [False, True])
def test_an_aborted_communicator_is_not_destroyed(
    make_communicator: Any, broadcast_fails: bool
) -> None:
    library = FakeLibrary()

    def broadcast() -> None:
        communicator.abort(UNIQUE_ID)
        if broadcast_fails:
            raise NcclError("ncclBroadcast: aborted")

    communicator = make_communicator(library, broadcast)
    with pytest.raises(NcclError, match="aborted"):
        communicator.send(UNIQUE_ID, 1, [])
    assert library.calls == ["ncclCommInitRank", "ncclCommAbort"]


def test_a_communicator_that_does_not_form_leaves_nothing_to_abort(make_communicator: Any) -> None:
    library = FakeLibrary("ncclCommInitRank")
    communicator = make_communicator(library, lambda: None)
    with pytest.raises(NcclError, match="ncclCommInitRank: unhandled system error"):
        communicator.send(UNIQUE_ID, 1, [])
    communicator.abort(UNIQUE_ID)
    assert library.calls == ["ncclCommInitRank"]
