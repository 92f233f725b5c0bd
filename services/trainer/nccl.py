"""NCCL, as much of it as sending weights to another program takes.

By the library that torch has loaded: torch's own groups meet in a store that vLLM does not know,
and its plain calls (`torch.cuda.nccl`) can neither abort a group nor free one. Has not run on GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapo_core.errors import BapoError

ID_BYTES = 128
SUM = 0
DATA_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""ncclDataType_t of what can be sent."""


class NcclError(BapoError):
    """NCCL has failed, or was told to give up."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class NcclLink:
    """Groups of this process's GPU, as rank 0, and the workers of an engine."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BapoError(
                "sync.transport is nccl, but the trainer has no GPU; set it to object_store"
            )
        self._library = library()
        self._device = torch.cuda.current_device()
        self._groups: dict[bytes, ctypes.c_void_p] = {}
        """Under way, by id."""

    def unique_id(self) -> bytes:
        """Of a group that is to be. NCCL waits for its members from now on: use every id."""
        found = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        """Joins as rank 0 of `receivers` + 1, and broadcasts one tensor after the other; those on
        the CPU are copied to the GPU one at a time. Raises `NcclError`."""
        torch.cuda.set_device(self._device)  # each thread has its own
        group, name = ctypes.c_void_p(), _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(group), receivers + 1, name, 0)
        self._groups[unique_id] = group
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        at = ctypes.c_void_p(stream.cuda_stream)
        try:
            with torch.cuda.stream(stream):
                # vLLM begins with one of these, and waits for ours.
                one = torch.zeros(1, device="cuda")
                pointer, kind = ctypes.c_void_p(one.data_ptr()), DATA_TYPES[one.dtype]
                self._call("ncclAllReduce", pointer, pointer, 1, kind, SUM, group, at)
                for tensor in tensors:
                    here = tensor.to("cuda").contiguous()
                    pointer, kind = ctypes.c_void_p(here.data_ptr()), DATA_TYPES[here.dtype]
                    self._call("ncclBroadcast", pointer, pointer, here.numel(), kind, 0, group, at)
            stream.synchronize()
        finally:
            if self._groups.pop(unique_id, None) is None:
                raise NcclError("the group was given up: nobody received in time")
            self._call("ncclCommDestroy", group)

    def abort(self, unique_id: bytes) -> None:
        """Gives a group up: what waits in it on the GPU ends. A group that never came together
        waits on, in its thread alone."""
        group = self._groups.pop(unique_id, None)
        if group is not None:
            self._call("ncclCommAbort", group)

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            words = self._library.ncclGetErrorString(result).decode()
            raise NcclError(f"{function}: {words}")


def library() -> ctypes.CDLL:
    """libnccl, with the types of what is called. Raises `BapoError` where there is none."""
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise BapoError(
            f"sync.transport is nccl, but there is no NCCL here ({error}); install a torch with "
            "CUDA, or set it to object_store"
        ) from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    found.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    found.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    found.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    found.ncclCommDestroy.argtypes = found.ncclCommAbort.argtypes = [pointer]
    found.ncclGetErrorString.argtypes = [number]
    found.ncclGetErrorString.restype = ctypes.c_char_p
    return found
