"""Keeps torchrun's rendezvous from running code of whoever reaches its port.

The nodes of a job keep their common state as a pickle in a store, which listens on all addresses
of the host and asks for no password: `bapo run` with several processes has one, too. torchrun
loads the state every few seconds. Here it is checked first: it may name the classes of the state,
and nothing else.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)

_STATE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_CLASSES = {
    (_STATE, "_RendezvousState"),
    (_STATE, "_NodeDesc"),
    *(("datetime", name) for name in ("datetime", "timezone", "timedelta")),
}
"""The classes of a state, by module and name."""


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is no class of a rendezvous")
        return super().find_class(module, name)


class _CheckedBackend(RendezvousBackend):
    """Passes on the states of another backend that name no foreign classes.

    Raises `RendezvousStateError` for another state.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        answer = self._backend.get_state()
        if answer is not None:
            _check_state(answer[0])
        return answer

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        answer = self._backend.set_state(state, token)
        if answer is not None:
            _check_state(answer[0])
        return answer


def _check_state(state: bytes) -> None:
    try:
        _StateUnpickler(io.BytesIO(state)).load()
    except Exception as error:  # of any kind, as what the store says is any
        raise RendezvousStateError(
            f"the state of the rendezvous is none ({error}): a foreign process has reached its port"
        ) from error


def check_rendezvous_states() -> None:
    """Makes torchrun check the states of a rendezvous of the kind c10d before it loads them."""

    def create_checked_handler(parameters: RendezvousParameters) -> RendezvousHandler:
        backend, store = create_backend(parameters)
        return create_handler(store, _CheckedBackend(backend), parameters)

    # `register` refuses a kind that torchrun has already; another name would not be its own kind.
    rendezvous_handler_registry._registry["c10d"] = create_checked_handler
