"""Copies tensors to the device that computes, and results back, without making the host wait more
often than it must."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes at a multiple of which each tensor begins, as the dtypes need."""


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns copies of tensors of the CPU on `device`, with one transfer for all of them.

    The host does not wait for the transfer to a GPU: it is from pinned memory, and what the device
    computes afterwards waits for it.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    starts, size = [], 0
    for part in flat:
        starts.append(size)
        size += -(-part.numel() // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8)
    for start, part in zip(starts, flat, strict=True):
        buffer[start : start + part.numel()] = part
    sent = buffer.pin_memory().to(device, non_blocking=True)
    return [
        sent[start : start + part.numel()].view(tensor.dtype).view(tensor.shape)
        for tensor, start, part in zip(tensors, starts, flat, strict=True)
    ]


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of tensors of one device on the CPU, flattened, with one transfer for all.

    They come as float64, which holds float32, bool and counts exactly.
    """
    if not tensors:
        return []
    joined = torch.cat([tensor.detach().flatten().double() for tensor in tensors]).cpu()
    return list(torch.split(joined, [tensor.numel() for tensor in tensors]))
