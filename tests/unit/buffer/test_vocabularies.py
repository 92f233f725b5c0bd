"""The texts of tokens are those of the tokenizers library, and hostile files are refused."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.buffer.storage import vocabularies
from services.buffer.storage.vocabularies import LONGEST_TEXT, read_texts, texts_of

TEXT = "The sum of 12 and 30 is 42.\n\tNaïve café: 3 × 4 ≤ 12, שלום 🧮 " * 3


def trained(byte_level: bool) -> Tokenizer:
    """Trains a BPE tokenizer: of bytes as GPT-2's, or of characters as SentencePiece's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token="<unk>"))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = []
    every_byte = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<|im_end|>", *([] if byte_level else every_byte)],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = ["The sum of 12 and 30 is 42. The sum is", "Naïve café: 3 and 12"] * 3
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.mark.parametrize("byte_level", [True, False])
def test_tokens_together_are_the_text(byte_level: bool) -> None:
    """Bytes of characters that are split are written in hexadecimal, and all others as text."""
    tokenizer = trained(byte_level)
    ids = [token_id for text in TEXT.split("\n") for token_id in tokenizer.encode(text).ids]
    tokens = texts_of(ids, read_texts(tokenizer.to_str().encode()))
    assert "The" in tokens
    assert " sum" in tokens
    assert "".join(tokens).startswith("The sum of 12 and 30 is 42.")
    assert not any("�" in token or "Ġ" in token or "▁" in token for token in tokens)
    data = bytearray()
    for token in tokens:
        if token.startswith("<0x"):
            data += bytes(int(part[2:4], 16) for part in token.split("<")[1:])
        else:
            data += token.encode()
    assert data.decode() == TEXT.replace("\n", "")
    assert "<0x9F><0xA7>" in "".join(tokens)


def test_added_tokens_are_shown_as_they_are_written() -> None:
    tokenizer = trained(byte_level=True)
    texts = read_texts(tokenizer.to_str().encode())
    end = tokenizer.token_to_id("<|im_end|>")
    assert texts_of([end, 10**6], texts) == ["<|im_end|>", "<unknown>"]


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ({"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.0]]}, {0: "<unk>", 1: " a"}),
        ({"type": "WordPiece", "vocab": {"play": 0, "##ing": 1}}, {0: " play", 1: "ing"}),
        ({"type": "WordLevel", "vocab": {"7": 0, "+": 1}}, {0: "7", 1: "+"}),
    ],
)
def test_other_kinds_of_vocabularies_are_read(model: object, texts: dict[int, str]) -> None:
    file = {"model": model, "decoder": {"type": "Metaspace"}}
    assert read_texts(json.dumps(file).encode()) == texts


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 100_000, "it is no tokenizer"),
        (b"{", "it is no tokenizer"),
        (b"[1]", "it is no tokenizer"),
        (b'{"model": {"vocab": {"a": "b"}}}', r"it is no tokenizer \(model.vocab"),
        (b'{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}', "added_tokens.0.content"),
        (b'{"model": {"vocab": {"\xff": 1}}}', "it is no tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_texts(data)


def test_a_file_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies, "MOST_VALUES", 3)
    with pytest.raises(ValueError, match="it has more than 3 values"):
        read_texts(b'{"model": {"vocab": {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}}}')


def test_hostile_parts_of_a_file_do_no_harm() -> None:
    """A token of any length is cut off, and a decoder of another shape is ignored."""
    file = {
        "model": {"vocab": {"a" * 10_000: 0, "日": 1, "<0xZZ>": -5}},
        "decoder": {"type": "ByteLevel", "decoders": ["x", {"type": ["ByteFallback"]}]},
        "pre_tokenizer": {"type": "Split", "pretokenizers": 5, "pattern": {"Regex": "(a+)+$"}},
    }
    assert read_texts(json.dumps(file).encode()) == {
        0: "a" * LONGEST_TEXT + "…",
        1: "日",
        -5: "<0xZZ>",
    }
