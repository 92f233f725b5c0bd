"""`ensure_model` refuses a model that the configuration's engine cannot serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from services.model.resolve import ensure_model


def config(model: Path, engine: str = "vllm") -> RunConfig:
    """Returns the configuration of a run whose sequences may have 160 tokens."""
    rollout = {"engine": engine, "max_prompt_tokens": 32, "max_response_tokens": 128}
    return config_from({"model": {"path": str(model)}, "rollout": rollout})


def model(directory: Path, **content: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"max_position_embeddings": 128}, id="text"),
        pytest.param({"text_config": {"max_position_embeddings": 128}}, id="text of images"),
    ],
)
def test_sequences_longer_than_vllm_takes_are_refused(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    directory = model(tmp_path, **content)
    with pytest.raises(BapoError, match=r"has 128 positions, but .* may have 160 tokens .* lower"):
        ensure_model(config(directory), tmp_path)
    # The transformers engine computes positions as they come.
    assert ensure_model(config(directory, "transformers"), tmp_path) == directory


@pytest.mark.parametrize(
    "content",
    [
        {"max_position_embeddings": 160, "rope_parameters": {"rope_type": "default"}},
        {"max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        {},
    ],
    ids=str,
)
def test_what_vllm_may_take_is_left_to_it(tmp_path: Path, content: dict[str, Any]) -> None:
    directory = model(tmp_path, **content)
    assert ensure_model(config(directory), tmp_path) == directory


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BapoError, match=r"is not a model directory: it has no config.json"):
        ensure_model(config(tmp_path), tmp_path)
