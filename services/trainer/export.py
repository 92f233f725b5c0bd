"""Writes a model as the files of a Hugging Face directory, its weights straight from memory."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from services.common.dtypes import SAFETENSORS_DTYPES
from services.common.objectstore import BinarySource, BytesContent, Content

LARGEST_SHARD = "256MB"
"""Largest size of a file of weights: a transfer that breaks off loses at most one file."""
INDEX = "model.safetensors.index.json"
DESCRIPTIONS = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files of a model directory that are copied: configuration and tokenizer."""

_PIECE = 1 << 24


def model_files(model: nn.Module, saved: dict[str, Tensor], source: Path) -> dict[str, Content]:
    """Returns the weights, the model's configuration and `source`'s tokenizer, by file name.

    saved: the result of `as_saved` for `model`, on the CPU. It is not copied: the contents read it
    while they are read.
    """
    split = split_torch_state_dict_into_shards(saved, max_shard_size=LARGEST_SHARD)
    files: dict[str, Content] = {
        file: Safetensors({name: saved[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        files[INDEX] = BytesContent(_json(index))
    dtype = next(tensor.dtype for tensor in saved.values() if tensor.is_floating_point())
    for path in source.iterdir():
        if path.suffix in DESCRIPTIONS and not path.name.endswith(".index.json"):
            files[path.name] = BytesContent(path.read_bytes())
    return files | _configuration(model, dtype)


def write_files(files: Mapping[str, Content], directory: Path) -> None:
    """Writes the files into `directory`, holding 16 MiB in memory at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with content.open() as source, (directory / name).open("wb") as file:
            while data := source.read(_PIECE):
                file.write(data)


def as_saved(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a state dict of `model` to the names and shapes that its files have."""
    ignored = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in weights.items() if name not in ignored}
    kept = remove_tied_weights_from_state_dict(kept, model)
    reverted: dict[str, Tensor] = revert_weight_conversion(model, kept)
    return reverted


def _configuration(model: Any, dtype: torch.dtype) -> dict[str, Content]:
    """Returns config.json and generation_config.json, for files of weights of this dtype."""
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        files = {path.name: json.loads(path.read_text()) for path in Path(directory).iterdir()}
    files["config.json"] |= {"architectures": [type(model).__name__], "dtype": dtype_name(dtype)}
    return {name: BytesContent(_json(value)) for name, value in files.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


class Safetensors:
    """The content of a safetensors file, made from tensors in memory as it is read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: on the CPU, by name."""
        # The largest elements first, so that every tensor is aligned.
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in ordered:
            begin, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": SAFETENSORS_DTYPES[dtype_name(tensor.dtype)],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self._tensors = [tensor for _, tensor in ordered]
        self.size = len(self._header) + end

    @contextmanager
    def open(self) -> Iterator[BinarySource]:
        yield _Pieces([memoryview(self._header), *map(_bytes_of, self._tensors)])


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class _Pieces:
    """A binary stream over several pieces of memory."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces, self._next, self._offset = pieces, 0, 0

    def read(self, size: int, /) -> bytes:
        chunks: list[memoryview] = []
        while size > 0 and self._next < len(self._pieces):
            chunk = self._pieces[self._next][self._offset : self._offset + size]
            self._offset += len(chunk)
            size -= len(chunk)
            chunks.append(chunk)
            if self._offset == len(self._pieces[self._next]):
                self._next, self._offset = self._next + 1, 0
        return b"".join(chunks)
