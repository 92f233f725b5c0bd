"""A conversation becomes token ids up to where the response begins."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.model.conversation import load_tokenizer, tokenize_conversation
from services.model.vision import load_processor
from tests.micro import save_micro_vision_model
from tools.tiny_models import vision as tiny_vision
from tools.tiny_models.text import build_tokenizer

OF_PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|image_pad|>' }}{% endfor %}{% endfor %}"
)
"""A template that renders the parts of a message alone, as that of SmolVLM."""


def test_the_beginning_of_a_response_follows_the_generation_prompt_as_it_is() -> None:
    tokenizer = build_tokenizer()
    question = {"role": "user", "content": "3 4=7:"}
    prompt = tokenize_conversation(tokenizer, [question])
    begun = tokenize_conversation(tokenizer, [question, {"role": "assistant", "content": "3+"}])
    assert begun == [*prompt, *tokenizer.encode("3+", add_special_tokens=False)]
    assert tokenizer.decode(begun).endswith("3+")


def test_the_text_of_a_message_is_one_of_its_parts_for_models_that_read_images(
    tmp_path: Path,
) -> None:
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = OF_PARTS
    vision = load_processor(save_micro_vision_model(tmp_path))
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [{"type": "text", "text": " 3+4"}]},
        {"role": "assistant", "content": "="},
    ]
    token_ids = tokenize_conversation(tokenizer, messages, vision)
    assert tokenizer.decode(token_ids) == "Answer. 3+4="


def test_a_template_that_prints_the_date_prints_the_given_day() -> None:
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d%m') }}+{{ messages[0]['content'] }}"
    message = {"role": "user", "content": "3+4"}
    texts = [
        tokenizer.decode(tokenize_conversation(tokenizer, [message], None, day))
        for day in (date(2026, 11, 26), date(2026, 11, 26), date(2025, 1, 2))
    ]
    assert texts == ["2611+3+4", "2611+3+4", "0201+3+4"]


@pytest.mark.parametrize(
    "date_of_today",
    [
        "{% set f = '%d%m' %}{{ strftime_now(f) }}",
        "{{ strftime_now(format='%d%m') }}",
        "{% set now = strftime_now %}{{ now('%d%m') }}",
        "{{ strftime_now('%d' ~ '%m') }}",
        "{% macro today() %}{{ strftime_now('%d%m') }}{% endmacro %}{{ today() }}",
        "{% if strftime_now is defined %}{{ strftime_now('%d%m') }}{% endif %}",
        "{{ '%d%m' | replace('x', '') if false else strftime_now(\n '%d%m' ) }}",
    ],
)
def test_the_given_day_is_printed_however_the_template_asks_for_it(date_of_today: str) -> None:
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = date_of_today + "+{{ messages[0]['content'] }}"
    message = {"role": "user", "content": "3+4"}
    day = date(2025, 1, 2)
    assert tokenizer.decode(tokenize_conversation(tokenizer, [message], None, day)) == "0201+3+4"


@pytest.mark.parametrize("directive", ["%5Y", "%^a", "%_d", "%Ey", "%Od", "%é", "%"])
def test_a_date_format_that_is_not_known_is_refused(directive: str) -> None:
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = f"{{{{ strftime_now('%d {directive}') }}}}"
    with pytest.raises(BapoError, match=r"the date format %d .* such as %d %B %Y"):
        tokenize_conversation(tokenizer, [{"role": "user", "content": "3+4"}])


def test_a_percent_sign_in_a_date_format_is_printed() -> None:
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%%d=%-d') }}"
    message = {"role": "user", "content": "3+4"}
    token_ids = tokenize_conversation(tokenizer, [message], None, date(2025, 1, 2))
    assert tokenizer.decode(token_ids) == "%d=2"


@pytest.mark.parametrize("named", [False, True])
def test_without_a_given_day_the_date_is_fixed(named: bool) -> None:
    """A tokenizer may have several templates by name, of which `default` renders conversations."""
    template = "{{ strftime_now('%d%m') }}+{{ messages[0]['content'] }}"
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = {"default": template} if named else template
    day = RunConfig().rollout.prompt_date
    token_ids = tokenize_conversation(tokenizer, [{"role": "user", "content": "3+4"}])
    assert tokenizer.decode(token_ids) == f"{day:%d%m}+3+4"
    stored = RunConfig.model_validate({"rollout": {"prompt_date": None}})
    assert stored.rollout.prompt_date == day


def test_the_template_may_stand_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BapoError, match=r"has no chat template; add a file chat_template\.jinja"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": OF_PARTS}))
    assert load_tokenizer(tmp_path).chat_template == OF_PARTS


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BapoError, match="its tokenizer cannot be loaded: ") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_prompt_that_the_tokenizer_or_the_template_refuses_is_one_line() -> None:
    question = {"role": "user", "content": "What is 3+4?"}
    with pytest.raises(BapoError, match=r"cannot encode a prompt: .*UNK.*; choose a model for"):
        tokenize_conversation(build_tokenizer(), [question])
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BapoError, match="template refuses a prompt: System role not supported;"):
        tokenize_conversation(tokenizer, [question])


def test_a_prompt_without_images_has_the_tokens_of_its_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizers of mistral-common take the marks of a rendered prompt for ordinary text."""
    tokenizer = build_tokenizer()
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 4=7:"}], add_generation_prompt=True, return_dict=False
    )
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: [])
    question = {"role": "user", "content": "3 4=7:"}
    assert tokenize_conversation(tokenizer, [question]) == expected


def test_images_need_a_tokenizer_that_encodes_rendered_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_micro_vision_model(tmp_path)
    tokenizer = load_tokenizer(directory)
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: [])
    with pytest.raises(BapoError, match="cannot encode prompts that its chat template has rende"):
        load_tokenizer(directory)
