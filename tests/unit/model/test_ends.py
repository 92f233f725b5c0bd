"""The tokens that end a response are the union of what a model's files name."""

from __future__ import annotations

import json
from pathlib import Path

from services.model.ends import find_end_tokens


def write(directory: Path, name: str, content: dict[str, object]) -> None:
    (directory / name).write_text(json.dumps(content))


def test_every_file_that_names_an_end_token_counts(tmp_path: Path) -> None:
    assert find_end_tokens(tmp_path) == []
    write(tmp_path, "config.json", {"eos_token_id": 3, "text_config": {"eos_token_id": 4}})
    assert find_end_tokens(tmp_path) == [3, 4]
    write(tmp_path, "generation_config.json", {"eos_token_id": [5, 3]})
    assert find_end_tokens(tmp_path) == [3, 4, 5]


def test_the_tokenizer_of_a_fine_tuned_model_ends_responses_too(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"eos_token_id": 0})
    added = [{"id": 0, "content": "<|endoftext|>"}, {"id": 2, "content": "<|im_end|>"}]
    write(tmp_path, "tokenizer.json", {"added_tokens": added})
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert find_end_tokens(tmp_path) == [0, 2]
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}})
    assert find_end_tokens(tmp_path) == [0]


def test_an_end_token_that_only_the_configuration_of_the_tokenizer_adds(tmp_path: Path) -> None:
    decoder = {"7": {"content": "<|im_end|>"}}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    write(tmp_path, "tokenizer_config.json", config)
    assert find_end_tokens(tmp_path) == [7]
