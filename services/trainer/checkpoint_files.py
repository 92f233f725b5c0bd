"""Reads the files of a checkpoint as data, without running what they name.

`torch.distributed.checkpoint` stores its index of a checkpoint as a pickle, `.metadata`, and each
value as another one. It loads both without limits, so that whoever can write to the bucket could
run code in the trainer and where a checkpoint is exported. Here the index is read into plain
values: no function and no class that it names is looked up, let alone called. The metadata are
then built from values of the expected shape. The stored values are read by `torch.load` with
`weights_only`, as those of models are.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from bapo_core.errors import BapoError

Kind = TypeVar("Kind")

INDEX = ".metadata"
"""Name of the file with the index of a checkpoint."""
_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
"""Matches the names of the files that hold a checkpoint's values."""
_DTYPES = {f"{dtype}": dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Types of tensors by the name under which a pickle has them, such as `torch.float32`."""
_METADATA = "torch.distributed.checkpoint.metadata"


def read_metadata(directory: Path, source: str) -> Metadata:
    """Returns the metadata of a checkpoint whose files are in `directory`.

    source: where the files come from, for messages. Raises `BapoError` for an index that
    `torch.distributed.checkpoint` has not written, or that points outside of the files.
    """
    try:
        data = (directory / INDEX).read_bytes()
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        return _build_metadata(_DataUnpickler(data).load(), sizes)
    except (
        pickle.UnpicklingError,
        OSError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        struct.error,
    ) as error:
        raise BapoError(
            f"{source}/{INDEX}: is no index of a checkpoint ({type(error).__name__}: {error}); "
            "bapo writes no such index: find out who has written to the bucket, and delete this "
            "checkpoint"
        ) from error


def load_state(state: dict[str, Any], directory: Path, metadata: Metadata) -> None:
    """Loads the values of a checkpoint into a state dict, in place, as far as it has their names.

    Every rank may call it for its own shards; the ranks exchange nothing. Raises
    `CheckpointException`, `RuntimeError` or `ValueError` for values that do not fit.
    """
    with warnings.catch_warnings():
        # It warns that it loads in a single process, which `no_dist` has asked for: the plan of a
        # rank follows from its own shards, and ranks would exchange their plans as pickles.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            state,
            storage_reader=_Reader(directory, metadata),
            planner=_Planner(),
            no_dist=True,
        )


class _Reader(FileSystemReader):
    """Reads values at the places of metadata that were checked."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Loads values that are no tensors, such as learning rates, without running their code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(
            self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True)
        )


# ---- the index ----------------------------------------------------------------------------------


class _Name(str):
    """The name of a function or a class in a pickle, `module.name`."""


class _Object:
    """An object in a pickle: what would be called, with which arguments, and the state it gets."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: _Name, arguments: Any) -> None:
        self.name, self.arguments, self.state = name, arguments, None


class _DataUnpickler(pickle._Unpickler):
    """Reads a pickle into plain values, names and `_Object`s; calls nothing.

    It is Python's own unpickler in Python, with those instructions alone that a checkpoint's index
    consists of. The one in C would also allocate whatever memory an instruction asks for.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode[0]: pickle._Unpickler.dispatch[opcode[0]]
        for opcode in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
            *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.STACK_GLOBAL),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
            *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
            *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        )
    }

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> _Name:
        return _Name(f"{module}.{name}")

    def _make_object(self) -> None:
        arguments = self.stack.pop()
        name = self.stack.pop()
        if not isinstance(name, _Name):
            raise ValueError("an object without a class")
        self.stack.append(_Object(name, arguments))

    def _set_state(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if not isinstance(built, _Object):
            raise ValueError("a state without an object")
        built.state = state

    dispatch |= {
        pickle.NEWOBJ[0]: _make_object,
        pickle.REDUCE[0]: _make_object,
        pickle.BUILD[0]: _set_state,
    }


def _build_metadata(index: Any, sizes: Mapping[str, int]) -> Metadata:
    """Builds metadata from an index as plain values.

    sizes: bytes of the checkpoint's files by name. Raises `ValueError` for another shape.
    """
    fields = _state_of(index, f"{_METADATA}.Metadata")
    of_values = _mapping(fields.get("state_dict_metadata"))
    places = _mapping(fields.get("storage_data"))
    return Metadata(
        state_dict_metadata={_text(name): _build_entry(value) for name, value in of_values.items()},
        storage_data={_build_key(key): _build_place(at, sizes) for key, at in places.items()},
        storage_meta=StorageMeta(),
    )


def _build_entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, _Object) and value.name == f"{_METADATA}.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _state_of(value, f"{_METADATA}.TensorStorageMetadata")
    properties = _object(fields.get("properties"), f"{_METADATA}.TensorProperties").state
    if not isinstance(properties, tuple) or not isinstance(properties[0], _Name):
        raise ValueError("a tensor without a type")
    chunks = [
        _state_of(chunk, f"{_METADATA}.ChunkStorageMetadata") for chunk in _list(fields["chunks"])
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_DTYPES[properties[0]]),
        size=_build_size(fields["size"]),
        chunks=[
            ChunkStorageMetadata(_build_size(chunk["offsets"]), _build_size(chunk["sizes"]))
            for chunk in chunks
        ],
    )


def _build_key(value: Any) -> MetadataIndex:
    fields = _state_of(value, f"{_METADATA}.MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if offset is None else _build_size(offset),
        None if index is None else _count(index),
    )


def _build_place(value: Any, sizes: Mapping[str, int]) -> _StorageInfo:
    fields = _state_of(value, "torch.distributed.checkpoint.filesystem._StorageInfo")
    name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if not _DATA.fullmatch(_text(name)) or name not in sizes:
        raise ValueError(f"{name!r:.200} is no file of the checkpoint")
    if _count(offset) + _count(length) > sizes[name]:
        raise ValueError(f"a value ends beyond the {sizes[name]} bytes of {name}")
    if fields.get("transform_descriptors"):
        raise ValueError("a value is encoded")
    return _StorageInfo(name, offset, length)


def _build_size(value: Any) -> torch.Size:
    arguments = _object(value, "torch.Size").arguments
    (numbers,) = arguments if isinstance(arguments, tuple) else ()
    if not isinstance(numbers, tuple):
        raise ValueError("a shape that is no tuple")
    return torch.Size([_count(number) for number in numbers])


def _object(value: Any, name: str) -> _Object:
    if not isinstance(value, _Object) or value.name != name:
        found = value.name if isinstance(value, _Object) else type(value).__name__
        raise ValueError(f"{found:.200} in place of {name}")
    return value


def _state_of(value: Any, name: str) -> dict[str, Any]:
    return _mapping(_object(value, name).state)


def _text(value: Any) -> str:
    return _of_kind(value, str)


def _list(value: Any) -> list[Any]:
    return _of_kind(value, list)


def _mapping(value: Any) -> dict[Any, Any]:
    return _of_kind(value, dict)


def _of_kind(value: Any, kind: type[Kind]) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.80} in place of a count")
    return value
