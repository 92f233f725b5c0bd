"""The text of each token of a run's tokenizer, for people who read tokens.

It is read from the `tokenizer.json` that lies beside the weights of version 1, which are never
pruned. The file is data that the author of a model wrote: it is parsed within limits, and none of
its regular expressions and templates is run, as loading the tokenizer itself would.
"""

from __future__ import annotations

import codecs
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from pydantic import BaseModel, ValidationError

from services.buffer.api import wire
from services.common.objectstore import ObjectStore

log = logging.getLogger(__name__)

FILE = "tokenizer.json"
LARGEST_FILE = 64 << 20
"""Bytes; the file of Gemma 3, whose vocabulary is among the largest, has 33 MB."""
MOST_VALUES = 4_000_000
"""Most commas of a file, which bounds its values and so the memory of parsing it; Gemma 3 has 1.3
million values."""
LONGEST_TEXT = 128
"""Characters of a token that are shown; a response may repeat a token many thousand times."""
KEPT = 4
"""Vocabularies in memory, each of some 20 MB."""

SPACE = "▁"
"""Character that SentencePiece writes for a space in its tokens."""


class _Model(BaseModel):
    type: str = ""
    vocab: dict[str, int] | list[tuple[str, float]]
    continuing_subword_prefix: str | None = None


class _AddedToken(BaseModel):
    id: int
    content: str


class _Tokenizer(BaseModel):
    model: _Model
    added_tokens: list[_AddedToken] = []
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class Vocabularies:
    """The texts of tokens by tokenizer, of which the last used ones stay in memory."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = Lock()
        self._kept: OrderedDict[str, Mapping[int, str] | None] = OrderedDict()

    def read(self, weights: wire.StoredVersion) -> Mapping[int, str] | None:
        """Returns the text of each token by id; None if the files do not tell it.

        weights: a version, beside whose weights the tokenizer lies.

        Raises `ObjectStoreError` if the files cannot be read.
        """
        digest = weights.manifest_digest
        with self._lock:  # One file is parsed at a time.
            if digest not in self._kept:
                self._kept[digest] = self._fetch(weights)
            self._kept.move_to_end(digest)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[digest]

    def _fetch(self, weights: wire.StoredVersion) -> Mapping[int, str] | None:
        with TemporaryDirectory() as temporary:
            directory = Path(temporary)
            self._store.get_directory(
                weights.uri, weights.manifest_digest, directory, include=lambda name: name == FILE
            )
            file = directory / FILE
            if not file.exists():
                log.warning("%s has no %s: tokens are shown as ids", weights.uri, FILE)
                return None
            if file.stat().st_size > LARGEST_FILE:
                log.warning("%s/%s is too large: tokens are shown as ids", weights.uri, FILE)
                return None
            data = file.read_bytes()
        try:
            return read_texts(data)
        except ValueError as error:
            log.warning("%s/%s: %s: tokens are shown as ids", weights.uri, FILE, error)
            return None


def texts_of(token_ids: Sequence[int], texts: Mapping[int, str]) -> list[str]:
    """Returns the text of each token; `<unknown>` for an id that the tokenizer does not have."""
    return [texts.get(token_id, "<unknown>") for token_id in token_ids]


def read_texts(data: bytes) -> dict[int, str]:
    """Returns the text of each token by id, from the bytes of a `tokenizer.json`.

    Bytes of a token that are a part of a character are written as in `<0xE2>`. Texts are cut off
    after `LONGEST_TEXT` characters.

    Raises `ValueError` for a file that is too large, or is not what the tokenizers library writes.
    """
    if data.count(b",") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        tokenizer = _Tokenizer.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"it is no tokenizer ({where}: {first['msg']})") from error
    kinds = {*_kinds(tokenizer.decoder), *_kinds(tokenizer.pre_tokenizer)}
    texts = {}
    for token, token_id in _entries(tokenizer.model):
        texts[token_id] = _cut(_text(token, kinds, tokenizer.model))
    for added in tokenizer.added_tokens:
        texts[added.id] = _cut(added.content)
    return texts


def _entries(model: _Model) -> Iterator[tuple[str, int]]:
    if isinstance(model.vocab, dict):
        yield from model.vocab.items()
    else:  # of a Unigram model, with the score of each token
        for token_id, (token, _) in enumerate(model.vocab):
            yield token, token_id


def _kinds(step: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields the types of a decoder or pre-tokenizer, and of those in a sequence."""
    if step is None:
        return
    lists = [step.get(name) for name in ("decoders", "pretokenizers")]
    parts = [part for parts in lists if isinstance(parts, list) for part in parts]
    for part in (step, *parts):
        if isinstance(part, dict):
            yield str(part.get("type"))


def _text(token: str, kinds: set[str], model: _Model) -> str:
    if "ByteLevel" in kinds:
        try:
            data = bytes(BYTES[character] for character in token)
        except KeyError:
            return token
        return data.decode("utf-8", errors="bapo.hexadecimal")
    if "ByteFallback" in kinds and len(token) == len("<0xE2>") and token.startswith("<0x"):
        return _fallback_byte(token)
    if model.type == "WordPiece":
        prefix = model.continuing_subword_prefix or "##"
        return token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    # Metaspace, and Replace in tokenizers of SentencePiece's BPE.
    return token.replace(SPACE, " ") if kinds & {"Metaspace", "Replace"} else token


def _fallback_byte(token: str) -> str:
    """Returns the character of `<0x0A>`; the token itself for a part of a character."""
    try:
        value = int(token[3:5], 16)
    except ValueError:
        return token
    return chr(value) if value < 0x80 else token


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's byte-level vocabularies.

    A byte that is a printable character of Latin-1 is that character; the others follow from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(0x100) if value not in printable]
    return {
        **{chr(value): value for value in printable},
        **{chr(0x100 + index): value for index, value in enumerate(others)},
    }


BYTES = _byte_alphabet()


def _write_in_hexadecimal(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    part = error.object[error.start : error.end]
    return "".join(f"<0x{value:02X}>" for value in part), error.end


codecs.register_error("bapo.hexadecimal", _write_in_hexadecimal)
