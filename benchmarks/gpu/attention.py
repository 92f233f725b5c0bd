"""Every attention kernel of the trainer: its results against the CPU's, and its times.

A check compares output and gradients on random packed sequences with `padded` in fp32 on the CPU. A
time is for one sequence that fills a row, as in the updates of the part `trainer`. A measurement
that fails is noted, and the next one goes on; a kernel that refuses what a check needs says why.
The cases are the kernels of `services.trainer.attention_kernels`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import DEVICE, free, peak_memory, seconds_of, synchronize
from benchmarks.gpu.record import Record, spread
from services.trainer.attention_kernels import KERNELS, TRIAL_TOLERANCE, Kernel, Needs
from services.trainer.sequences import Sequences

ROWS = (16_384, 65_536)
TOY_SHRINKAGE = 256
"""A row at toy size is this many times shorter."""
SHAPES = {"qwen3-0.6b": (16, 8, 128), "qwen3-4b": (32, 8, 128)}
"""Heads of queries, heads of keys, and their size. Not from `models`, so that results stay current
while the trainer changes."""
REPEATS = 5
BACKWARD = 2.5
"""FLOPs of the backward pass for one of the forward pass: five matrix products instead of two."""
RAGGED = (1, 130, 17, 512, 64, 777, 2)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Check:
    """Attention whose results are compared."""

    head: int
    key_heads: int = 2
    groups: int = 1
    """Query heads for each key head."""
    window: int | None = None
    lengths: tuple[int, ...] = RAGGED
    value: int | None = None
    """Size of the heads of values, if it is another one."""
    shared: int = 0
    """Tokens of the prompt that all sequences share, in pairs of the same length."""

    @property
    def name(self) -> str:
        words = [f"heads of {self.head}"]
        words += [f"values of {self.value}"] if self.value else []
        words += [f"groups of {self.groups}"] if self.groups > 1 else []
        words += [f"window of {self.window}"] if self.window else []
        words += [f"prompts of {self.shared} shared"] if self.shared else []
        words += ["equal lengths"] if len(set(self.lengths)) == 1 else []
        return ", ".join(words)

    @property
    def needs(self) -> Needs:
        windowed = self.window is not None
        value = self.value or self.head
        return Needs(self.head, value, self.groups, windowed, torch.bfloat16)


MAIN_CHECKS = (Check(128, groups=2), Check(128, groups=4))
"""What the models of the part `trainer` need; measured before the times."""
OTHER_CHECKS = (
    Check(128),
    Check(64, groups=2),
    Check(128, groups=2, window=100),
    Check(128, groups=2, lengths=(512,) * 4),
    Check(128, groups=2, shared=60, lengths=(200, 100, 300, 64)),
    Check(256, groups=2),
    Check(80),
    Check(64, groups=8, window=16),
    Check(192, value=128),
    Check(512),
)


def shrink(check: Check) -> Check:
    """Returns the check at toy size."""
    lengths = tuple(max(1, length // 8) for length in check.lengths)
    return replace(check, lengths=lengths, shared=check.shared // 8)


class WrongResults(Exception):
    """A kernel computes something else than the CPU."""


def measure(record: Record) -> None:
    record.measure({name: partial(measure_kernel, record, KERNELS[name]) for name in KERNELS})


def measure_kernel(record: Record, kernel: Kernel) -> dict[str, Any]:
    """Adds a result for each measurement of a kernel; returns a summary of them.

    Raises `WrongResults` after the last one if a check is beyond the tolerance.
    """
    results: dict[str, dict[str, Any]] = {}

    def attempt(name: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            results[name] = work()
        except Exception as error:  # noqa: BLE001 - kernels of other projects may raise anything
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:2_000]}
        record.add(f"{kernel.name}/{name}", results[name])
        if "refused" not in results[name]:
            free()

    def compare(checks: Sequence[Check]) -> None:
        for check in checks:
            smaller = shrink(check) if record.toy else check
            attempt(f"check/{check.name}", partial(run_check, kernel, smaller))

    compare(MAIN_CHECKS)
    for shape in SHAPES:
        for row in ROWS:
            length = row // TOY_SHRINKAGE if record.toy else row
            attempt(f"time/{shape}/{row}", partial(measure_time, kernel, shape, length))
    compare(OTHER_CHECKS)
    result = summary(results)
    if result["wrong"]:
        raise WrongResults(f"{kernel.name}: {', '.join(result['wrong'])}")
    return result


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    checks = {name: result for name, result in results.items() if name.startswith("check/")}
    differences = [result["largest"] for result in checks.values() if "largest" in result]
    return {
        "checks": len(checks),
        "refused": sorted(name for name, result in results.items() if "refused" in result),
        "failed": sorted(name for name, result in results.items() if "failed" in result),
        "wrong": [
            name for name, result in checks.items() if not result.get("within_tolerance", True)
        ],
        "largest_difference": max(differences, default=None),
        "ms": {
            name.removeprefix("time/"): [1e3 * result[way]["median"] for way in DIRECTIONS]
            for name, result in results.items()
            if "forward" in result
        },
    }


DIRECTIONS = ("forward", "backward")


# -- checks


def run_check(kernel: Kernel, check: Check) -> dict[str, Any]:
    """Compares output and gradients with `padded` in fp32 on the CPU, on the same inputs.

    Differences are norms, relative to the norm of the CPU's result.
    """
    if reason := kernel.refusal(check.needs, DEVICE):
        return {"refused": reason}
    sequences = sequences_of(check)
    tokens = int(sequences.cu_seqlens[-1]) if sequences.kept is None else len(sequences.kept)
    value = check.value or check.head
    heads = check.key_heads * check.groups
    inputs = draw(tokens, heads, check.key_heads, check.head, value)
    direction = torch.randn(tokens, heads, value, generator=torch.Generator().manual_seed(1))
    # Rounded on both sides, as the inputs are.
    direction = direction.bfloat16()
    expected = run(KERNELS["padded"], inputs, direction, sequences, check.window, torch.float32)
    started = time.perf_counter()
    moved = [tensor.to(DEVICE) for tensor in inputs]
    bounds = sequences.to(DEVICE)
    results = run(kernel, moved, direction.to(DEVICE), bounds, check.window, torch.bfloat16)
    synchronize()
    first_call = time.perf_counter() - started
    differences = {
        name: float((result.cpu().float() - right).norm() / right.norm())
        for name, result, right in zip(RESULTS, results, expected, strict=True)
    }
    largest = max(differences.values())
    return {
        **differences,
        "largest": largest,
        "tolerance": TRIAL_TOLERANCE,
        # A difference that is no number is none that is small.
        "within_tolerance": largest <= TRIAL_TOLERANCE,
        "first_call_s": first_call,
    }


RESULTS = ("output", "query_gradient", "key_gradient", "value_gradient")


def sequences_of(check: Check) -> Sequences:
    lengths = torch.tensor(check.lengths)
    sequences = Sequences.of(lengths)
    if not check.shared:
        return sequences
    prompts = torch.full_like(lengths, check.shared)
    return sequences.share_prompts(prompts, torch.arange(len(lengths)) // 2)


def draw(tokens: int, heads: int, key_heads: int, size: int, value: int) -> list[Tensor]:
    """Draws query, key and value in bfloat16 on the CPU, from seed 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, size), (key_heads, size), (key_heads, value))
    return [torch.randn(tokens, *shape, generator=generator).bfloat16() for shape in shapes]


def run(
    kernel: Kernel,
    inputs: list[Tensor],
    direction: Tensor,
    sequences: Sequences,
    window: int | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Returns the output and the gradients of query, key and value."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    query, key, value = leaves
    output = kernel.compute(query, key, value, sequences, None, window)
    gradients = torch.autograd.grad(output, leaves, direction.to(dtype))
    return [output.detach(), *gradients]


# -- times


@contextmanager
def deterministic() -> Iterator[None]:
    """Has PyTorch, and the kernels that ask it, sum in a fixed order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def measure_time(kernel: Kernel, shape: str, row: int) -> dict[str, Any]:
    """Measures forward and backward pass of one layer over one sequence of `row` tokens."""
    heads, key_heads, size = SHAPES[shape]
    needs = Needs(size, size, heads // key_heads, False, torch.bfloat16)
    if reason := kernel.refusal(needs, DEVICE):
        return {"refused": reason}
    sequences = Sequences.of(torch.tensor([row])).to(DEVICE)
    kind: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    leaves = [
        torch.randn(row, n, size, **kind).requires_grad_() for n in (heads, key_heads, key_heads)
    ]
    query, key, value = leaves
    direction = torch.randn(row, heads, size, **kind)

    def forward() -> Tensor:
        return kernel.compute(query, key, value, sequences, None, None)

    with peak_memory() as memory:
        output = forward()
        torch.autograd.grad(output, leaves, direction)
    forward_s = spread(seconds_of(forward, repeats=REPEATS, warm_up=2))
    output = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, direction, retain_graph=True)

    backward_s = spread(seconds_of(backward, repeats=REPEATS, warm_up=1))
    same_bits = all(map(torch.equal, backward(), backward()))
    with deterministic():
        output = forward()
        deterministic_s = spread(seconds_of(backward, repeats=REPEATS, warm_up=1))
    flops = 2 * row * row * heads * size  # two products, half of whose results causality leaves out
    return {
        "row": row,
        "forward": forward_s,
        "backward": backward_s,
        "deterministic_backward": deterministic_s,
        "same_bits": same_bits,
        "forward_tflops": flops / forward_s["median"] / 1e12,
        "backward_tflops": BACKWARD * flops / backward_s["median"] / 1e12,
        "memory": memory.report(),
    }
