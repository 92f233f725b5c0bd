"""Keeps a process that poses as a rank of a trainer from running code in the other ranks.

`torch.distributed.checkpoint.save` gathers the plans of the ranks and what they wrote by the object
collectives of `torch.distributed`, which load pickles of the other ranks. `set_model_state_dict`
announces the shapes of a model's tensors by them. Nothing else in the trainer uses them. Here what
they load may name the classes of plans and shapes, and nothing else: an error is sent as its text,
and a member of an enumeration by its value.
"""

from __future__ import annotations

import logging
import pickle
from enum import Enum
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException

from bapo_core.errors import BapoError

log = logging.getLogger(__name__)

_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        (f"{_CHECKPOINT}.planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")
    ),
    (f"{_CHECKPOINT}.planner", "WriteItemType"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    (f"{_CHECKPOINT}.filesystem", "_StoragePrefix"),
    (f"{_CHECKPOINT}.storage", "WriteResult"),
    ("torch.distributed._state_dict_utils", "_TensorInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # returns a `torch.layout` by its name
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    # The error of a rank that could not save, and where it was raised.
    (__name__, "RankError"),
    (f"{_CHECKPOINT}.api", "CheckpointException"),
    ("traceback", "StackSummary"),
    ("traceback", "FrameSummary"),
}
"""The classes and functions, by module and name, that ranks name when they save a checkpoint or
spread the weights of a model."""


class RankError(Exception):
    """The error of a rank as the other ranks get it: its text, with the name of its class."""


class PlanPickler(pickle.Pickler):
    """Writes what ranks exchange when they save a checkpoint or spread weights.

    PyTorch sends the error of a rank to the others and logs it nowhere. It is logged here, where it
    was raised, and sent as a `RankError`, because the class of an error may be any.
    """

    def reducer_override(self, value: Any) -> Any:
        """Returns how errors and members of enumerations are written; all else is as usual."""
        if isinstance(value, Enum):
            # Some versions of Python 3.11 would name `getattr` in its place.
            return type(value), (value.value,)
        if not isinstance(value, BaseException) or isinstance(value, CheckpointException):
            return NotImplemented
        error = as_rank_error(value)
        if value.__traceback__ is not None:  # The error of another rank has none.
            log.error("this rank has failed: %s", error, exc_info=value)
        return RankError, (str(error),)


class PlanUnpickler(pickle.Unpickler):
    """Loads what `PlanPickler` writes.

    Raises `pickle.UnpicklingError` for a pickle that names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"a rank of the trainer has sent {module}.{name}, which no plan of a checkpoint has: a "
            "foreign process has reached the ranks' ports, or bapo does not know this version of "
            f"PyTorch ({torch.__version__}); close the ports to others, or install PyTorch 2.13"
        )


def as_rank_error(error: BaseException) -> RankError:
    """Returns an error as the other ranks get it."""
    if isinstance(error, RankError):
        return error
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return RankError(f"{module}{kind.__qualname__}: {error}")


def check_collective_objects() -> None:
    """Makes the object collectives of this process refuse what no plan of a checkpoint has.

    Raises `BapoError` for a version of PyTorch that loads objects in another way.
    """
    names = ("_pickler", "_unpickler")
    used = [getattr(distributed_c10d, name, None) for name in names]
    if used not in ([pickle.Pickler, pickle.Unpickler], [PlanPickler, PlanUnpickler]):
        raise BapoError(
            f"PyTorch {torch.__version__} exchanges objects between the ranks of a trainer in a "
            "way that bapo does not know, so that it cannot refuse code (torch.distributed."
            "distributed_c10d._unpickler); install PyTorch 2.13, or a newer bapo"
        )
    distributed_c10d._pickler = PlanPickler
    distributed_c10d._unpickler = PlanUnpickler
