"""Checks a model directory without loading it, because a damaged one would crash vLLM.

Safetensors headers are parsed here, not by `safetensors.safe_open`: a replica with vLLM runs in the
service environment, which has neither safetensors nor torch (those are in vLLM's own environment).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.dtypes import TORCH_DTYPES
from services.model.ends import find_end_tokens, log_end_tokens
from services.model.json_files import read_object, section_of
from services.model.layers import ATTENTION
from services.model.vision import WITH_VLLM
from services.rollout.errors import ModelLoadError, explain_damage

_MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format."""


@dataclass(frozen=True)
class Layout:
    """The model in a directory, without its weights' values.

    If two directories have equal layouts, the weights of one can be loaded in place of the other's.
    """

    config: dict[str, Any]
    """Content of config.json."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name → (data type by its name in safetensors, shape)."""
    ends: list[int]
    """Ids of the tokens that end a response."""

    def torch_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns `tensors` with data types by their names in torch."""
        return {name: (TORCH_DTYPES[d], shape) for name, (d, shape) in self.tensors.items()}

    @property
    def vocabulary_size(self) -> int:
        text = self.config.get("text_config") or self.config
        return int(text["vocab_size"])

    @property
    def takes_images(self) -> bool:
        """Whether vLLM takes images of the model together with token ids."""
        return takes_images(self.config)

    @property
    def image_token(self) -> int | None:
        """Placeholder of images; None if the model reads none."""
        if not reads_images(self.config):
            return None
        names = ("image_token_id", "image_token_index")
        return next((int(self.config[name]) for name in names if name in self.config), None)


def reads_images(config: Mapping[str, Any]) -> bool:
    """Returns whether a model has a vision tower. config: the content of its config.json."""
    return "vision_config" in config


def takes_images(config: Mapping[str, Any]) -> bool:
    """Returns whether vLLM takes images of a model together with token ids."""
    return config.get("model_type") in WITH_VLLM


def has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration names a layer whose state is not keys and values."""
    text = config.get("text_config") or config
    if kinds := text.get("layer_types"):
        return bool(set(kinds) - ATTENTION)
    return any(name.startswith("mamba") for name in text)


def read_layout(directory: Path) -> Layout:
    """Reads the layout of a Hugging Face directory.

    Raises `ModelLoadError` if it is not a model directory, or if a file is missing, truncated or of
    another shape.
    """
    with explain_damage(directory):
        layout = _read_layout(directory)
        # The driver asks for these later, where a configuration of another shape would end it.
        _ = layout.vocabulary_size, layout.image_token, layout.takes_images
        _ = has_recurrent_layers(layout.config), layout.torch_tensors()
    return layout


def _read_layout(directory: Path) -> Layout:
    file = directory / "config.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{directory}: not a model directory (it has no config.json); give a Hugging Face "
            "model directory"
        )
    config = read_object(file)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= _read_header(file)
    if not tensors:
        raise ModelLoadError(f"{directory}: has no *.safetensors; publish the weights again")
    index = directory / "model.safetensors.index.json"
    for name in sorted(section_of(read_object(index), "weight_map", index).keys() - tensors.keys()):
        raise ModelLoadError(
            f"{directory}: no file has the tensor {name}; publish the weights again"
        )
    return Layout(config, tensors, _end_tokens(directory))


def _read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the tensors of a safetensors file, after checking its length against its header."""
    damaged = ModelLoadError(f"{file}: not a complete safetensors file; publish the weights again")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8 or (length := struct.unpack("<Q", prefix)[0]) > _MAX_HEADER_BYTES:
            raise damaged
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            complete = file.stat().st_size == 8 + length + end
            tensors = {
                name: (str(entry["dtype"]), tuple(map(int, entry["shape"])))
                for name, entry in header.items()
            }
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise damaged from error
    if not complete:
        raise damaged
    return tensors


def _end_tokens(directory: Path) -> list[int]:
    ends = find_end_tokens(directory)
    if not ends:
        raise ModelLoadError(
            f"{directory}: names no end token, so no response could ever end; set eos_token_id in "
            "generation_config.json"
        )
    log_end_tokens(ends)
    return ends
