"""The processes that train together: what they share, and who takes which groups.

Collectives of small things on the CPU, by gloo. All ranks must make the same calls in the same
order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `size` that train together; rank 0 speaks for all."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None for the default one."""

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over the ranks; all give the same names."""
        if self.size == 1:
            return values
        names = sorted(values)
        total = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return dict(zip(names, total.tolist(), strict=True))

    def largest(self, value: int) -> int:
        """Of what the ranks give. Nobody goes on before all have come here."""
        if self.size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def shared(self, ask: Callable[[], Value]) -> Value:
        """What rank 0 finds out; the others do not ask."""
        if self.size == 1:
            return ask()
        box = [ask() if self.speaks else None]
        dist.broadcast_object_list(box, group=self.group)
        found: Any = box[0]
        return found  # type: ignore[no-any-return]

    def gathered(self, value: Value) -> list[Value]:
        """What every rank gives, by rank; for rank 0 alone, the others get nothing."""
        if self.size == 1:
            return [value]
        box = [value] * self.size if self.speaks else None
        dist.gather_object(value, box, group=self.group)
        return box or []


@contextmanager
def joined() -> Iterator[Ranks]:
    """torchrun's process group, or one of a single process."""
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
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def shares(costs: Sequence[float], size: int) -> list[list[int]]:
    """Indexes into `costs` by rank, so that the ranks' sums are close: the dearest go first, each
    to the rank with the least so far. In order within a rank."""
    taken: list[list[int]] = [[] for _ in range(size)]
    sums = [0.0] * size
    for index in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        rank = min(range(size), key=lambda each: (sums[each], each))
        taken[rank].append(index)
        sums[rank] += costs[index]
    return [sorted(indexes) for indexes in taken]
