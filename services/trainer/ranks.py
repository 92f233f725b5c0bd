"""The ranks of a trainer: their collectives of small values, and which rank takes which groups.

The collectives run on the CPU by gloo. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.threads import start_detached

Value = TypeVar("Value")

KEEP_ALIVE_S = 10.0
"""Seconds after which ranks that wait for another one hear that it is still working."""

_memory: Any = torch.utils.deterministic


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `size` that train together; rank 0 alone writes to the buffer."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """The process group of the collectives; None is the default one."""

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    def all_reduce_sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums each value over the ranks; all ranks give the same names."""
        if self.size == 1:
            return values
        names = sorted(values)
        total = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return dict(zip(names, total.tolist(), strict=True))

    def moments(self, values: Tensor) -> tuple[float, float, float]:
        """Returns the mean, the population variance and the number of the values of all ranks."""
        exact = values.double()
        sums = self.all_reduce_sum(
            {
                "count": float(len(exact)),
                "sum": float(exact.sum()),
                "squares": float(exact.square().sum()),
            }
        )
        count = max(sums["count"], 1.0)
        mean = sums["sum"] / count
        return mean, max(sums["squares"] / count - mean**2, 0.0), count

    def all_gather(self, values: Tensor) -> Tensor:
        """Returns the tensors (n, columns) of all ranks, concatenated along the columns by rank."""
        if self.size == 1:
            return values
        box = [values] * self.size
        dist.all_gather_object(box, values, group=self.group)
        return torch.cat(box, dim=1)

    def all_reduce_max(self, value: int) -> int:
        """Returns the largest of the ranks' values."""
        if self.size == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def wait_for_all(self, function: Callable[[], Value]) -> Value:
        """Calls `function` on every rank; returns its result when it has returned on all of them.

        It may take as long as it likes on any rank, while another collective fails after half an
        hour. It must not contain a collective itself.
        """
        if self.size == 1:
            return function()
        call = start_detached(function)
        while True:
            wait([call], timeout=KEEP_ALIVE_S)
            if call.done():
                call.result()  # An error ends this rank at once, and the others with it.
            if not self.all_reduce_max(int(not call.done())):
                return call.result()

    def from_main(self, function: Callable[[], Value]) -> Value:
        """Calls `function` on rank 0 alone, and returns its result on every rank.

        It may take as long as it likes, as in `wait_for_all`.
        """
        if self.size == 1:
            return function()
        box = [self.wait_for_all(function if self.is_main else lambda: None)]
        dist.broadcast_object_list(box, group=self.group)
        result: Any = box[0]
        return result  # type: ignore[no-any-return]

    def gather_to_main(self, value: Value) -> list[Value]:
        """Returns the ranks' values by rank on rank 0, and an empty list on the others."""
        if self.size == 1:
            return [value]
        box = [value] * self.size if self.is_main else None
        dist.gather_object(value, box, group=self.group)
        return box or []


@contextmanager
def init_distributed() -> Iterator[Ranks]:
    """Joins torchrun's process group, or makes one of this process alone; leaves it at the end.

    On CPUs, equal inputs give equal bits meanwhile, also with several threads.
    """
    cuda = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        with nullcontext() if cuda else _deterministic_algorithms():
            yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Makes PyTorch use deterministic algorithms.

    Without them, the threads of a CPU add up the gradient of an indexed tensor in any order. The
    tokens of a shared prompt are such a tensor: each of its responses adds to their gradient.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    filled = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _memory.fill_uninitialized_memory = False  # a debugging aid that takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        _memory.fill_uninitialized_memory = filled


def balance_by_cost(costs: Sequence[float], size: int) -> list[list[int]]:
    """Returns indexes into `costs` by rank, in order, so that the ranks' sums are close.

    The most expensive go first, each to the rank with the smallest sum so far.
    """
    by_rank: list[list[int]] = [[] for _ in range(size)]
    sums = [0.0] * size
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(size), key=lambda rank: (sums[rank], rank))
        by_rank[rank].append(index)
        sums[rank] += costs[index]
    return [sorted(indexes) for indexes in by_rank]
