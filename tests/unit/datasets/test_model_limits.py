"""Prompts that a model cannot take are refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_core.errors import BapoError
from services.model.limits import ModelLimits


def limits(directory: Path, config: dict[str, Any]) -> ModelLimits:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelLimits.read(directory)


def test_a_token_id_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    found = limits(tmp_path, {"vocab_size": 10, "rope_theta": 1e4})
    found.check_ids([0, 9])
    with pytest.raises(BapoError, match="token id 10, but the model's embedding has 10 rows"):
        found.check_ids([3, 10])


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_more_tokens_than_positions_are_refused(tmp_path: Path, key: str) -> None:
    found = limits(tmp_path, {"vocab_size": 10, key: 100})
    found.check_length(60, 40)
    with pytest.raises(BapoError, match="are 101 tokens, but the model has 100 positions"):
        found.check_length(61, 40)


def test_rotary_embeddings_have_no_largest_position(tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": 7, "max_position_embeddings": 10, "rope_theta": 1e4}}
    assert limits(tmp_path, config) == ModelLimits(7, None)
    assert ModelLimits.read(tmp_path / "none") == ModelLimits(None, None)
