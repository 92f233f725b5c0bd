"""Turns conversations into the token ids that a model reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.config.rollouts import DEFAULT_PROMPT_DATE
from bapo_core.errors import BapoError
from bapo_core.tasks import Message
from services.model.json_files import read_object
from services.model.load_errors import explain_load_error
from services.model.rendering import bounded_rendering
from services.model.vision import VisionProcessor, images_of, reads_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model directory, with its chat template.

    Raises `BapoError` when it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # of any kind, as what the files say is any
        raise BapoError(
            f"{directory}: its tokenizer cannot be loaded: {explain_load_error(error)}"
        ) from error
    # Older directories of models that read images have the template beside the tokenizer.
    beside = directory / "chat_template.json"
    if tokenizer.chat_template is None:
        tokenizer.chat_template = read_object(beside).get("chat_template")
    if tokenizer.chat_template is None:
        raise BapoError(
            f"{directory}: its tokenizer has no chat template; add a file chat_template.jinja to "
            "the directory, which for a model without roles is "
            "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        )
    if reads_images(directory):
        _require_encodable_templates(tokenizer, directory)
    return tokenizer  # type: ignore[no-any-return]


def _require_encodable_templates(tokenizer: Any, directory: Path) -> None:
    """Raises `BapoError` if encoding what the template renders gives other tokens than its own.

    Images are expanded in the rendered text. The tokenizers of mistral-common take the marks in it
    for ordinary text.
    """
    probe: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with _explain_refusals():
        rendered, token_ids = (
            tokenizer.apply_chat_template(
                probe, add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )
            for tokenize in (False, True)
        )
        encoded = tokenizer.encode(rendered, add_special_tokens=False)
    if encoded != token_ids:
        raise BapoError(
            f"{directory}: its tokenizer ({type(tokenizer).__name__}) cannot encode prompts that "
            "its chat template has rendered, which images need; give a tokenizer.json, and "
            "uninstall mistral-common if it is installed"
        )


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    vision: VisionProcessor | None = None,
    day: date = DEFAULT_PROMPT_DATE,
) -> list[int]:
    """Returns the token ids of a conversation, up to where the response begins.

    A last message of the assistant follows the generation prompt as it is, because chat templates
    add to it: that of Qwen3 puts an empty <think></think> before it.

    vision: the processor of a model that reads images. day: the date that a template prints which
    prints one (`rollout.prompt_date`).

    Raises `BapoError` for images without a processor, and for a conversation that the template or
    the tokenizer cannot take.
    """
    last = messages[-1]
    prefix = str(last["content"]) if last["role"] == "assistant" else ""
    shown = messages[:-1] if prefix else messages
    images = images_of(messages)
    if images and vision is None:
        raise BapoError("the prompts have images, but the model reads none; choose another model")
    if vision is not None:
        shown = [_in_parts(message) for message in shown]
    with _explain_refusals():
        template = _dated_template(tokenizer.get_chat_template(), day)
        if images and vision is not None:
            rendered: Any = tokenizer.apply_chat_template(
                shown, add_generation_prompt=True, tokenize=False, chat_template=template
            )
            expanded = vision.expand(rendered, images)
            prompt = tokenizer.encode(expanded, add_special_tokens=False)
        else:
            # Some tokenizers cannot encode what their templates render.
            prompt = tokenizer.apply_chat_template(
                shown,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                chat_template=template,
            )
        return [*prompt, *tokenizer.encode(prefix, add_special_tokens=False)]


_DIRECTIVES = (
    *"aAbBcdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ",
    *(f"-{key}" for key in "deHIjklmMSuUVwWy"),
)
"""Letters after % in the format of a date."""
_OTHER_DIRECTIVE = (
    " has a directive other than % and a letter, or %- and a letter; write the format in the "
    "template in another way, such as %d %B %Y"
)


def _dated_template(template: str, day: date) -> str:
    """Returns a chat template in which the function `strftime_now` gives `day` instead of today.

    transformers gives templates no functions but its own, so a macro of this name hides its
    function. The line break, which Jinja removes, keeps the template's first line a line. A
    directive that it does not know, such as `%5Y`, raises instead of standing in the prompt.
    """
    if "strftime_now" not in template:
        return template
    texts = {f"%{key}": day.strftime(f"%{key}") for key in _DIRECTIVES}
    replaced = "".join(f".replace({key!r}, {text!r})" for key, text in texts.items())
    return (
        "{%- macro strftime_now(format) -%}"
        f"{{%- set text = format.replace('%%', '\\0'){replaced} -%}}"
        "{%- if '%' in text -%}"
        f"{{{{- raise_exception('the date format ' ~ format ~ {_OTHER_DIRECTIVE!r}) -}}}}"
        "{%- endif -%}"
        "{{- text.replace('\\0', '%') -}}"
        f"{{%- endmacro %}}\n{template}"
    )


def decode_response(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, ended: bool
) -> str:
    """Returns the text of a response as the model wrote it, with special tokens such as <think>.

    Only tokens of its end and padding are left out. They are recognised by their ids, and the last
    token of a response that has `ended` is one if it is special: `generation_config.json` may name
    others than the tokenizer.
    """
    left_out = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    kept = list(token_ids)
    if ended and kept and kept[-1] in tokenizer.all_special_ids:
        kept.pop()
    kept = [token for token in kept if token not in left_out]
    return str(tokenizer.decode(kept, skip_special_tokens=False))


@contextmanager
def _explain_refusals() -> Iterator[None]:
    try:
        with bounded_rendering():
            yield
    except Exception as error:
        if type(error) is not Exception:  # what the package tokenizers raises
            raise
        raise BapoError(
            f"the model's tokenizer cannot encode a prompt: {error}; choose a model for such "
            "texts, or for those that come with bapo the prompts of examples/countdown.yaml "
            "(task.options.template=short) and examples/geometry.yaml"
        ) from error


def _in_parts(message: Message) -> Message:
    """Returns a message whose content is a list of parts.

    The templates of some models that read images leave out content that is a text.
    """
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {"role": message["role"], "content": [{"type": "text", "text": content}]}
