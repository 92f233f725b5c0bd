"""How fast the device can compute and copy: what every other figure of the run is compared with."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.device import DEVICE, GPU, seconds_of
from benchmarks.gpu.record import Record, spread

REPEATS = 10


def measure(record: Record) -> None:
    edge = 128 if record.toy else 8_192
    size = 1 << (20 if record.toy else 32)
    record.add("matrix_product", matrix_product(edge))
    record.add("device_copy", copy(size, DEVICE, DEVICE))
    for pinned in (True, False) if GPU else (False,):
        name = "pinned" if pinned else "pageable"
        record.add(f"host_to_device_{name}", copy(size // 4, torch.device("cpu"), DEVICE, pinned))
        record.add(f"device_to_host_{name}", copy(size // 4, DEVICE, torch.device("cpu"), pinned))


def matrix_product(edge: int) -> dict[str, Any]:
    """Multiplies random square matrices in bfloat16; zeros would be faster."""
    left, right = (torch.randn(edge, edge, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    seconds = spread(seconds_of(lambda: torch.mm(left, right, out=out), repeats=REPEATS))
    return {"edge": edge, "seconds": seconds, "tflops": 2 * edge**3 / seconds["median"] / 1e12}


def copy(
    size: int, source: torch.device, target: torch.device, pinned: bool = False
) -> dict[str, Any]:
    """Copies `size` bytes. Within the device, bytes read and bytes written both count."""
    start, end = (
        torch.zeros(size, dtype=torch.uint8, device=device).pin_memory()
        if pinned and device.type == "cpu"
        else torch.zeros(size, dtype=torch.uint8, device=device)
        for device in (source, target)
    )
    seconds = spread(seconds_of(lambda: end.copy_(start, non_blocking=pinned), repeats=REPEATS))
    moved = 2 * size if source == target else size
    return {"bytes": size, "seconds": seconds, "gb_per_s": moved / seconds["median"] / 1e9}
