"""The tokenizer of the tiny models: one token for each character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def build_character_tokenizer(
    special: Sequence[str], characters: Iterable[str], *, chat_template: str, max_length: int
) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each character; an unknown character raises.

    special: special tokens, which have the first ids; the first two are those of padding and of the
    end of a response.
    chat_template: Jinja template of a conversation.
    max_length: greatest number of tokens.
    """
    vocabulary = {token: index for index, token in enumerate((*special, *characters))}
    # No unk_token in the vocabulary: an unknown character raises instead of becoming padding.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[1],
        additional_special_tokens=list(special[2:]),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
