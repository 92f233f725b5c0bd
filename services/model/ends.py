"""The tokens that end a response, as every file of a model directory names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_core.errors import BapoError


def find_end_tokens(directory: Path) -> list[int]:
    """Returns the ids of the tokens that end a response, in ascending order.

    They are the union of those of generation_config.json, config.json and the tokenizer, as in vLLM
    and TRL: a base model's configuration names <|endoftext|>, and the tokenizer of its fine-tuned
    model <|im_end|>. Empty if no file names one. Raises `BapoError` for a file that is not JSON.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = _read(directory / name)
        for section in (config, config.get("text_config") or {}):
            ends = section.get("eos_token_id")
            found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    found.update(_find_tokenizer_end(directory))
    return sorted(found)


def _find_tokenizer_end(directory: Path) -> Iterator[int]:
    """Yields the id of the tokenizer's end token, if its files tell it."""
    config = _read(directory / "tokenizer_config.json")
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if text is None:
        return
    added = _read(directory / "tokenizer.json").get("added_tokens") or []
    added = [
        *added,
        *({"id": int(n)} | t for n, t in (config.get("added_tokens_decoder") or {}).items()),
    ]
    yield from (token["id"] for token in added if token.get("content") == text)


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise BapoError(f"{file}: not JSON; the directory is damaged, publish it again") from error
    return content
