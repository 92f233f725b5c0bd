"""A conversation becomes token ids up to where the response begins."""

from __future__ import annotations

from services.model.conversation import tokenize_conversation
from services.model.tiny import build_tokenizer


def test_the_beginning_of_a_response_follows_the_generation_prompt_as_it_is() -> None:
    tokenizer = build_tokenizer()
    question = {"role": "user", "content": "3 4=7:"}
    prompt = tokenize_conversation(tokenizer, [question])
    begun = tokenize_conversation(tokenizer, [question, {"role": "assistant", "content": "3+"}])
    assert begun == [*prompt, *tokenizer.encode("3+", add_special_tokens=False)]
    assert tokenizer.decode(begun).endswith("3+")
