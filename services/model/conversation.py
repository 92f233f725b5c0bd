"""Turns conversations into the token ids that a model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError
from bapo_core.tasks import Message
from services.model.vision import VisionProcessor, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    vision: VisionProcessor | None = None,
) -> list[int]:
    """Returns the token ids of a conversation, up to where the response begins.

    A last message of the assistant follows the generation prompt as it is, because chat templates
    add to it: that of Qwen3 puts an empty <think></think> before it.

    vision: the processor of a model that reads images.

    Raises `BapoError` for images without a processor.
    """
    last = messages[-1]
    prefix = str(last["content"]) if last["role"] == "assistant" else ""
    rendered: Any = tokenizer.apply_chat_template(
        messages[:-1] if prefix else messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    token_ids = [*rendered, *tokenizer.encode(prefix, add_special_tokens=False)]
    images = images_of(messages)
    if vision is not None:
        return vision.expand(token_ids, images)
    if images:
        raise BapoError("the prompts have images, but the model reads none; choose another model")
    return token_ids
