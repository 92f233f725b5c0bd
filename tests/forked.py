"""Calls functions in processes that are forked from one that has imported PyTorch already.

A new interpreter takes seconds to import PyTorch and transformers, longer than most tests take.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from services.stack.supervisor import reserve_ports

PRELOADED = [
    "services.rollout.transformers_engine",
    "tests.integration.support.ranks_program",
    "tests.integration.support.vision_ranks_program",
]
"""Modules that the process from which all others are forked imports."""


def run_forked(function: Callable[..., None], *arguments: Any) -> None:
    """Calls `function` in a process of its own, whose settings of PyTorch end with it.

    Raises what the function raises.
    """
    _start(_call, (function, arguments), 1)


def run_ranks(processes: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls `function` in this many processes, with the variables that torchrun sets.

    Raises what the first rank that fails raises, after the end of the others.
    """
    with reserve_ports(1) as (port,):
        _start(_call_as_rank, (processes, port, function, arguments), processes)


def _start(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
    start_processes(  # type: ignore[no-untyped-call]
        function, arguments, processes, start_method="forkserver"
    )


def _call(_: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    function(*arguments)


def _call_as_rank(
    rank: int, size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    function(*arguments)
