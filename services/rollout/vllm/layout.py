"""What is in a model directory, read without loading it: a bad one would kill vLLM."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.rollout.engine import ModelLoadError

_LONGEST_HEADER = 100 << 20
_TORCH = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
}


@dataclass(frozen=True)
class Layout:
    """Two directories of equal layout differ in the weights' values alone."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name → (dtype, shape)."""
    ends: list[int]
    """Tokens that end a response."""

    def torch_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """`tensors`, with dtypes as torch calls them."""
        return {name: (_TORCH[d], shape) for name, (d, shape) in self.tensors.items()}

    @property
    def vocabulary(self) -> int:
        text = self.config.get("text_config") or self.config
        return int(text["vocab_size"])


def read_layout(directory: Path) -> Layout:
    """Raises `ModelLoadError` for what is no model directory, or a damaged one."""
    config = _json(directory / "config.json")
    generation = _json(directory / "generation_config.json", optional=True)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= _header(file)
    if not tensors:
        raise ModelLoadError(f"{directory}: has no *.safetensors; publish the weights again")
    index = _json(directory / "model.safetensors.index.json", optional=True)
    for name in sorted(index.get("weight_map", {}).keys() - tensors.keys()):
        raise ModelLoadError(f"{directory}: {name} is in no file; publish the weights again")
    return Layout(config, tensors, _ends(directory, config, generation))


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ModelLoadError(
            f"{path.parent}: not a model directory (it has no {path.name})"
        ) from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON; publish the weights again") from error
    return dict(content)


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of a safetensors file, which must be as long as its header says."""
    damaged = ModelLoadError(f"{file}: not whole safetensors; publish the weights again")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8 or (length := struct.unpack("<Q", prefix)[0]) > _LONGEST_HEADER:
            raise damaged
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise damaged from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if file.stat().st_size != 8 + length + end:
        raise damaged
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _ends(directory: Path, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    for source in (generation, config, config.get("text_config") or {}):
        ends = source.get("eos_token_id")
        if ends is not None:
            return list(ends) if isinstance(ends, list) else [ends]
    raise ModelLoadError(
        f"{directory}: names no end token, so no response could ever end; set eos_token_id in "
        "generation_config.json"
    )
