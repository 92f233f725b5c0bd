"""The text of a response is what the model wrote, special tokens included."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.model.conversation import decode_response

WORDS = ["<pad>", "<end>", "<turn>", "<think>", "</think>", "<answer>", "</answer>", "x", "7"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    base = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="x"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=WORDS[2:7],
    )


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize("end", ["<end>", "<turn>", "<end> <pad>", ""])
def test_tags_that_are_special_tokens_stay_and_ends_do_not(
    tokenizer: PreTrainedTokenizerFast, end: str
) -> None:
    written = "<think> x </think> <answer> 7 </answer>"
    text = decode_response(tokenizer, ids(f"{written} {end}"), ended=bool(end))
    assert text.replace(" ", "") == written.replace(" ", "")


def test_a_response_that_was_cut_off_keeps_its_last_special_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert "<answer>" in decode_response(tokenizer, ids("x <answer>"), ended=False)
