"""The tokens that end a response, as every file of a model directory names them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.model.json_files import read_object, section_of

log = logging.getLogger(__name__)


def find_end_tokens(directory: Path) -> list[int]:
    """Returns the ids of the tokens that end a response, in ascending order.

    They are the union of those of generation_config.json, config.json and the tokenizer, as in vLLM
    and TRL: a base model's configuration names <|endoftext|>, and the tokenizer of its fine-tuned
    model <|im_end|>. Empty if no file names one. Raises `BapoError` for a file that has no JSON
    object.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = read_object(directory / name)
        for section in (config, section_of(config, "text_config", directory / name)):
            ends = section.get("eos_token_id")
            found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    found.update(_find_tokenizer_end(directory))
    return sorted(found)


def log_end_tokens(ends: Sequence[int]) -> None:
    """Says which tokens end a response, as every engine does when it has read a model."""
    log.info("responses end with the tokens %s", ", ".join(map(str, ends)))


def _find_tokenizer_end(directory: Path) -> Iterator[int]:
    """Yields the id of the tokenizer's end token, if its files tell it."""
    config = read_object(directory / "tokenizer_config.json")
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if text is None:
        return
    added = read_object(directory / "tokenizer.json").get("added_tokens") or []
    added = [
        *added,
        *({"id": int(n)} | t for n, t in (config.get("added_tokens_decoder") or {}).items()),
    ]
    yield from (token["id"] for token in added if token.get("content") == text)
