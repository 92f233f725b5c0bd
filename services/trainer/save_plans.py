"""Keeps the ranks of a trainer from running code of whoever speaks in place of one of them.

`torch.distributed.checkpoint.save` gathers the plans of the ranks and what they wrote by the object
collectives of `torch.distributed`, which load pickles of the other ranks. `set_model_state_dict`
announces the shapes of a model's tensors by them. Nothing else in the trainer uses them. Here what
they load may name the classes of plans, shapes and errors, and nothing else.
"""

from __future__ import annotations

import builtins
import pickle
from typing import Any

import torch
from torch.distributed import distributed_c10d

from bapo_core.errors import BapoError

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
    (f"{_CHECKPOINT}.api", "CheckpointException"),
    ("traceback", "StackSummary"),
    ("traceback", "FrameSummary"),
}
"""The classes and functions, by module and name, that ranks name when they save a checkpoint or
spread the weights of a model."""


class PlanUnpickler(pickle.Unpickler):
    """Loads what ranks exchange when they save a checkpoint or spread weights.

    Raises `pickle.UnpicklingError` for a pickle that names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module == "builtins" and _is_error(found := getattr(builtins, name, None)):
            return found
        raise pickle.UnpicklingError(
            f"a rank of the trainer has sent {module}.{name}, which no plan of a checkpoint and no "
            "error of Python has: if it is an error, the log of that rank says more; if not, a "
            "foreign process has reached the ranks' ports"
        )


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def check_collective_objects() -> None:
    """Makes the object collectives of this process refuse what no plan of a checkpoint has.

    Raises `BapoError` for a version of PyTorch that loads objects in another way.
    """
    loader = getattr(distributed_c10d, "_unpickler", None)
    if loader not in (pickle.Unpickler, PlanUnpickler):
        raise BapoError(
            f"PyTorch {torch.__version__} loads what the ranks of a trainer send in a way that "
            "bapo does not know, so that it cannot refuse code (torch.distributed.distributed_c10d"
            "._unpickler); install PyTorch 2.13, or a newer bapo"
        )
    distributed_c10d._unpickler = PlanUnpickler
