"""The ranks of a trainer: their collectives of small values, and which rank takes which groups.

The collectives run on the CPU by gloo. All ranks must make the same calls in the same order.

What ranks exchange are tensors, numbers, texts, and dicts, lists and tuples of them: the object
collectives of `torch.distributed` would load a pickle of any process that poses as a rank. PyTorch
uses them itself when it saves a checkpoint; `services.trainer.save_plans` limits what they load.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor
from torch.nn.functional import pad

from services.common.threads import start_detached
from services.trainer.save_plans import check_collective_objects

Value = TypeVar("Value")
Model = TypeVar("Model", bound=BaseModel)

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
        widths = self._all_gather_numbers(values.shape[1])
        padded = pad(values, (0, max(widths) - values.shape[1])).contiguous()
        box = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(box, padded, group=self.group)
        of_ranks = [tensor[:, :width] for tensor, width in zip(box, widths, strict=True)]
        return torch.cat(of_ranks, dim=1)

    def _all_gather_numbers(self, number: int) -> list[int]:
        """Returns the ranks' numbers by rank."""
        numbers = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]), group=self.group)
        return [int(each) for each in numbers]

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

        It may take as long as it likes, as in `wait_for_all`. The result is one that `_encode`
        takes.
        """
        if self.size == 1:
            return function()
        result = self.wait_for_all(function if self.is_main else lambda: None)
        encoded = _encode(result)
        length = torch.tensor([len(encoded)])
        dist.broadcast(length, 0, group=self.group)
        if not self.is_main:
            encoded = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(encoded, 0, group=self.group)
        return cast(Value, result if self.is_main else _decode(encoded))

    def model_from_main(
        self, kind: type[Model], function: Callable[[], Model | None]
    ) -> Model | None:
        """Calls `function` on rank 0 alone, and returns its result on every rank, as `from_main`.

        kind: the type of the result unless it is None.
        """
        if self.size == 1:
            return function()

        def call() -> str | None:
            model = function()
            return None if model is None else model.model_dump_json()

        text = self.from_main(call)
        return None if text is None else kind.model_validate_json(text)

    def gather_to_main(self, value: Value) -> list[Value]:
        """Returns the ranks' values by rank on rank 0, and an empty list on the others.

        value: one that `_encode` takes.
        """
        if self.size == 1:
            return [value]
        encoded = _encode(value)
        lengths = self._all_gather_numbers(len(encoded))
        padded = pad(encoded, (0, max(lengths) - len(encoded)))
        box = [torch.empty_like(padded) for _ in lengths] if self.is_main else None
        dist.gather(padded, box, 0, group=self.group)
        by_rank = zip(box or [], lengths if self.is_main else [], strict=True)
        return [cast(Value, _decode(tensor[:length])) for tensor, length in by_rank]


def _encode(value: Any) -> Tensor:
    """Returns a value as bytes: tensors, numbers, texts, None, and dicts, lists, tuples of them."""
    data = io.BytesIO()
    torch.save(value, data)
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _decode(encoded: Tensor) -> Any:
    """Returns the value of bytes. Runs no code that they name."""
    return torch.load(io.BytesIO(encoded.numpy().tobytes()), weights_only=True)


@contextmanager
def init_distributed() -> Iterator[Ranks]:
    """Joins torchrun's process group, or makes one of this process alone; leaves it at the end.

    On CPUs, equal inputs give equal bits meanwhile, also with several threads.
    """
    check_collective_objects()
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
