"""The part of NCCL that broadcasting weights to another program takes, called by ctypes.

It uses the library that torch has loaded. torch's own process groups meet in a store that vLLM does
not know, and `torch.cuda.nccl` can neither abort a communicator nor destroy one. Experimental: it
has not run on GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
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
"""ncclDataType_t of every dtype that can be sent."""


class NcclError(BapoError):
    """An NCCL call failed, or its communicator was aborted."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class NcclCommunicator:
    """Communicators of this process's GPU, as rank 0, with the workers of an engine."""

    def __init__(self) -> None:
        """Raises `BapoError` without a GPU or without NCCL."""
        if not torch.cuda.is_available():
            raise BapoError(
                "sync.transport is nccl, but the trainer has no GPU; set it to object_store"
            )
        self._library = library()
        self._device = torch.cuda.current_device()
        self._open: dict[bytes, ctypes.c_void_p] = {}
        """Communicators in use, by their unique id. Whoever pops one destroys or aborts it."""

    def unique_id(self) -> bytes:
        """Creates an NCCL unique id for a new communicator.

        Each id must be used: NCCL keeps a bootstrap thread for it.
        """
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def send(self, unique_id: bytes, receivers: int, tensors: Sequence[Tensor]) -> None:
        """Joins the communicator as rank 0 of `receivers` + 1, and broadcasts one tensor at a time.

        Tensors on the CPU are copied to the GPU as they are sent. The communicator is destroyed
        afterwards, and aborted after an error, because destroying it would wait for its receivers.

        Raises `NcclError`, and `RuntimeError` when CUDA fails.
        """
        torch.cuda.set_device(self._device)  # each thread has its own
        communicator, name = ctypes.c_void_p(), _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(communicator), receivers + 1, name, 0)
        self._open[unique_id] = communicator
        try:
            self._broadcast(communicator, tensors)
        except BaseException:
            with suppress(NcclError):  # the first error says more
                self.abort(unique_id)
            raise
        if self._open.pop(unique_id, None) is None:
            raise NcclError("the communicator was aborted: a receiver did not answer in time")
        self._call("ncclCommDestroy", communicator)

    def abort(self, unique_id: bytes) -> None:
        """Aborts a communicator: its operations on the GPU end, and `send` raises `NcclError`.

        Has no effect on one that is not complete, whose `send` waits for its receivers in
        `ncclCommInitRank`, nor on one that `send` has closed.
        """
        communicator = self._open.pop(unique_id, None)
        if communicator is not None:
            self._call("ncclCommAbort", communicator)

    def _broadcast(self, communicator: ctypes.c_void_p, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        handle = ctypes.c_void_p(stream.cuda_stream)
        with torch.cuda.stream(stream):
            # vLLM begins with one all-reduce, and waits for ours.
            one = torch.zeros(1, device="cuda")
            pointer, dtype = ctypes.c_void_p(one.data_ptr()), DATA_TYPES[one.dtype]
            self._call("ncclAllReduce", pointer, pointer, 1, dtype, SUM, communicator, handle)
            for tensor in tensors:
                source = tensor.to("cuda").contiguous()
                pointer, dtype = ctypes.c_void_p(source.data_ptr()), DATA_TYPES[source.dtype]
                count = source.numel()
                self._call("ncclBroadcast", pointer, pointer, count, dtype, 0, communicator, handle)
        stream.synchronize()

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            reason = self._library.ncclGetErrorString(result).decode()
            raise NcclError(f"{function}: {reason}")


def library() -> ctypes.CDLL:
    """Loads libnccl and declares the functions used here. Raises `BapoError` without one."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise BapoError(
            f"sync.transport is nccl, but NCCL cannot be loaded ({error}); install a torch with "
            "CUDA, or set sync.transport to object_store"
        ) from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    nccl.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    nccl.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    nccl.ncclCommDestroy.argtypes = nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclGetErrorString.argtypes = [number]
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl
