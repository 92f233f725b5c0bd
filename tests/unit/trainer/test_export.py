"""An exported model has the files that transformers writes for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.common.dtypes import SAFETENSORS_DTYPES
from services.trainer import export
from services.trainer.export import Safetensors, as_saved, model_files
from tests.micro import micro_model


def mixture_of_experts() -> Any:
    """Builds a model whose experts are one tensor in memory and many in files."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def contents(files: dict[str, Any], piece: int) -> dict[str, bytes]:
    """Reads each file in pieces of this size."""
    data = {}
    for name, content in files.items():
        with content.open() as source:
            data[name] = b"".join(iter(lambda source=source: source.read(piece), b""))
        assert len(data[name]) == content.size
    return data


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize(
    "make",
    [lambda: micro_model(tie_word_embeddings=True), micro_model, mixture_of_experts],
    ids=["tied", "untied", "experts"],
)
def test_the_files_equal_those_of_save_pretrained(
    make: Any, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "LARGEST_SHARD", "8KB")
    model = make()
    expected = tmp_path / "expected"
    model.save_pretrained(expected, max_shard_size="8KB")
    (expected / "tokenizer.json").write_text("{}")
    directory = tmp_path / "exported"
    directory.mkdir()
    saved = as_saved(model, model.state_dict())
    for name, data in contents(model_files(model, saved, expected), piece).items():
        (directory / name).write_bytes(data)
    assert {path.name for path in directory.glob("*.json")} == {
        path.name for path in expected.glob("*.json")
    }
    for name in ("config.json", "generation_config.json"):
        assert json.loads((directory / name).read_text()) == (
            json.loads((expected / name).read_text())
        )
    index = json.loads((directory / export.INDEX).read_text())["weight_map"]
    tensors, exported = tensors_of(expected), tensors_of(directory)
    assert exported.keys() == tensors.keys() == index.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_every_dtype_and_shape_is_written() -> None:
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)).transpose(0, 1)
        for name in SAFETENSORS_DTYPES
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    data = contents({"file": Safetensors(tensors)}, 1000)["file"]
    loaded = load(data)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
