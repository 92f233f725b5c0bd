"""The device that is measured, and how time, memory and operators are measured on it."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOP_OPERATORS = 10


def synchronize() -> None:
    """Waits until the device has done what it was given."""
    if GPU:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], *, repeats: int, warm_up: int = 3) -> list[float]:
    """Returns the seconds of each of `repeats` calls, by the device's own clock on a GPU."""
    for _ in range(warm_up):
        work()
    synchronize()
    return [_timed_on_gpu(work) if GPU else _timed(work) for _ in range(repeats)]


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _timed_on_gpu(work: Callable[[], Any]) -> float:
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class Memory:
    """Bytes that the device holds: when the block began, and at the block's peak."""

    before: int = 0
    peak: int = 0
    reserved: int = 0
    """Peak of what the allocator has taken from the device, caches and fragments included."""

    def report(self) -> dict[str, float]:
        """Returns GiB at the peak: used, beyond what was used before, and reserved."""
        gib = 1 << 30
        return {
            "peak_gib": self.peak / gib,
            "extra_gib": (self.peak - self.before) / gib,
            "reserved_gib": self.reserved / gib,
        }


@contextmanager
def peak_memory() -> Iterator[Memory]:
    """Measures the memory of its block. On a CPU it is the process's peak since it started."""
    gc.collect()
    memory = Memory()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        memory.before = torch.cuda.memory_allocated()
    else:
        memory.before = _resident_peak()
    yield memory
    synchronize()
    memory.peak = torch.cuda.max_memory_allocated() if GPU else _resident_peak()
    memory.reserved = torch.cuda.max_memory_reserved() if GPU else memory.peak


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def profiled(work: Callable[[], Any]) -> dict[str, Any]:
    """Runs `work` once; returns its most expensive operators, and the GPU's idle share of the time.

    The idle share is what is left of the wall-clock time without the union of all kernels and
    copies; None on a CPU. The profiler slows the host down, so it is an upper bound.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    with profile(activities=activities):
        synchronize()  # the first profile of a process starts the tracing library
    with profile(activities=activities) as trace:
        started = time.perf_counter()
        work()
        synchronize()
        wall = time.perf_counter() - started
    key = "self_device_time_total" if GPU else "self_cpu_time_total"
    # The names of phases enclose operators, so their time would count twice.
    found = [event for event in trace.key_averages() if not event.is_user_annotation]
    if GPU:
        # An operator has the time of its kernels, which are events too.
        found = [event for event in found if event.device_type == DeviceType.CUDA]
    operators = sorted(found, key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in operators)
    busy = _busy_s(trace)
    return {
        "wall_s": wall,
        "idle_share": 1 - busy / wall if GPU else None,
        "operators": [
            {
                "name": event.key[:120],
                "calls": event.count,
                "ms": getattr(event, key) / 1e3,
                "share": getattr(event, key) / total,
            }
            for event in operators[:TOP_OPERATORS]
        ],
    }


def _busy_s(trace: profile) -> float:
    """Returns the seconds in which at least one kernel or copy ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    return union_length(spans) / 1e6


def union_length(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of spans, which are sorted by their start."""
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def free() -> None:
    """Returns memory that nothing refers to any more to the device, and forgets compiled code."""
    torch.compiler.reset()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
