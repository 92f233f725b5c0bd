"""Compares the lengths of a run's prompts with its limit, before the run begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.tasks import Payload, Task, get_task
from bapo_core.tasks.base import DEMONSTRATION
from services.buffer.api.wire import PromptItem
from services.common.errors import task_errors
from services.datasets.dataset import Dataset, name_dataset
from services.datasets.load import RunDatasets, check_number
from services.datasets.sources import TRAIN_PATH, address_key, data_addresses
from services.model.conversation import load_tokenizer, tokenize_conversation
from services.model.limits import ModelLimits
from services.model.vision import VisionProcessor, load_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def limit_lengths(config: RunConfig, datasets: RunDatasets, model: Path) -> RunDatasets:
    """Returns the datasets with no prompt of more than `rollout.max_prompt_tokens` tokens.

    model: directory with the tokenizer of the initial model.

    Longer training prompts are left out if `task.drop_long_prompts` is set. Raises `BapoError` for
    those that are not, and for longer held-out prompts, without which accuracies would be those of
    another benchmark; and for token ids and lengths that the model cannot take, with which every
    request would fail.
    """
    tokenizer, vision = load_tokenizer(model), load_processor(model)
    limits = ModelLimits.read(model)
    limits.check_length(config.rollout.max_prompt_tokens, config.rollout.max_response_tokens)
    limit = config.rollout.max_prompt_tokens

    def find_long(dataset: Dataset, options: Mapping[str, Any]) -> dict[str, int]:
        lengths = _lengths(config, options, dataset, tokenizer, vision, limits)
        return {uid: length for uid, length in lengths.items() if length > limit}

    for name, held_out in datasets.test.items():
        too_long = find_long(held_out, config.evaluation_sets[name].options)
        if too_long:
            raise BapoError(_describe(config, address_key(config, name), held_out, too_long))
    train = datasets.train
    too_long = find_long(train, config.task.arguments)
    if not too_long:
        return datasets
    if not config.task.drop_long_prompts:
        message = _describe(config, TRAIN_PATH, train, too_long)
        raise BapoError(f"{message}, or set task.drop_long_prompts to train without them")
    kept = [prompt for prompt in train.prompts if prompt.uid not in too_long]
    shorter = replace(
        train,
        name=name_dataset(config.task.name, "train", kept),
        prompts=kept,
        too_long=len(too_long),
        demonstrated=sum(DEMONSTRATION in prompt.payload for prompt in kept),
    )
    check_number(config, shorter)
    if train.demonstrated and not shorter.demonstrated:
        raise BapoError(
            "the demonstrations section needs correct responses to training prompts, but those "
            f"that have one have more than rollout.max_prompt_tokens ({limit}) tokens; raise the "
            "limit, or remove the section"
        )
    return RunDatasets(shorter, datasets.test)


def _lengths(
    config: RunConfig,
    options: Mapping[str, Any],
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    limits: ModelLimits,
) -> dict[str, int]:
    """Returns the number of tokens of each prompt by its uid."""
    task, day = get_task(config.task.name, **options), config.rollout.prompt_date
    lengths = {}
    for prompt in dataset.prompts:
        token_ids = tokenize_prompt(task, prompt, tokenizer, vision, day)
        with _name_prompt(prompt):
            limits.check_ids(token_ids)
        lengths[prompt.uid] = len(token_ids)
    return lengths


def tokenize_prompt(
    task: Task,
    prompt: PromptItem,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    day: date,
) -> list[int]:
    """Returns the token ids of a prompt as the task renders it.

    vision, day: as `tokenize_conversation` takes them.

    Raises `BapoError`, which names the prompt, when the task cannot render it, and as
    `tokenize_conversation` does.
    """
    with _name_prompt(prompt):
        with task_errors(task.name, "render"):
            messages = task.render(prompt.payload)
        return tokenize_conversation(tokenizer, messages, vision, day)


@contextmanager
def _name_prompt(prompt: PromptItem) -> Iterator[None]:
    """Adds the uid and the beginning of a prompt to what is wrong with it."""
    try:
        yield
    except BapoError as error:
        raise BapoError(f"prompt {prompt.uid} ({_excerpt(prompt.payload)}): {error}") from error


def _excerpt(payload: Payload) -> str:
    """Returns the beginning of a payload."""
    text = json.dumps(payload, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _describe(config: RunConfig, key: str, dataset: Dataset, too_long: Mapping[str, int]) -> str:
    """Returns a message of the prompts that are too long, which a remedy may follow.

    key: the configuration's key of the data set's address.
    """
    longest = max(too_long, key=lambda uid: too_long[uid])
    source = key if data_addresses(config)[key] else f"prompts that task {config.task.name} makes"
    return (
        f"{source}: {len(too_long)} of {len(dataset.prompts)} have more tokens than "
        f"rollout.max_prompt_tokens ({config.rollout.max_prompt_tokens}), the longest "
        f"{too_long[longest]} ({longest}); raise the limit"
    )
