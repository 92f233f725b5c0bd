"""Prompts that are too long are found before a run begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bapo_core.config import RunConfig, load_config
from bapo_core.errors import BapoError
from bapo_core.tasks import get_task
from bapo_core.tasks.countdown import CountdownTask
from services.buffer.api.wire import PromptItem
from services.datasets import Dataset, RunDatasets, limit_lengths, load_datasets
from services.model.conversation import tokenize_conversation
from services.model.resolve import TINY_MODEL
from services.model.vision import images_of
from tests.image_prompts import TASK
from tests.micro import save_micro_vision_model

NUMBERS = "task.options={template: short, numbers: [2, 3, 4]}"


def config_of(limit: int, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            NUMBERS,
            "task.train_prompts=60",
            "task.test_prompts=5",
            "rollout.prompts_per_step=8",
            "optimizer.minibatch_prompts=8",
            f"rollout.max_prompt_tokens={limit}",
            *overrides,
        ],
    )


def lengths_of(config: RunConfig, dataset: Dataset, model: Path) -> dict[str, int]:
    tokenizer, task = AutoTokenizer.from_pretrained(model), get_task("countdown", template="short")
    return {
        prompt.uid: len(tokenize_conversation(tokenizer, task.render(prompt.payload)))
        for prompt in dataset.prompts
    }


@pytest.fixture
def datasets() -> RunDatasets:
    return load_datasets(config_of(2048))


@pytest.fixture
def lengths(datasets: RunDatasets, small_model: Path) -> dict[str, int]:
    return lengths_of(config_of(2048), datasets.train, small_model)


@pytest.fixture
def limit(lengths: dict[str, int]) -> int:
    """Returns a limit that some of the training prompts exceed, and no held-out prompt."""
    return sorted(set(lengths.values()))[-2]


def without_held_out(datasets: RunDatasets) -> RunDatasets:
    return RunDatasets(datasets.train, {})


def test_training_prompts_that_are_too_long_are_refused_at_the_start(
    datasets: RunDatasets, lengths: dict[str, int], limit: int, small_model: Path
) -> None:
    longest = max(lengths.values())
    number = list(lengths.values()).count(longest)
    message = (
        rf"prompts that task countdown makes: {number} of 60 have more tokens than "
        rf"rollout\.max_prompt_tokens \({limit}\), the longest {longest} \(countdown:[\d:-]+\); "
        r"raise the limit, or set task\.drop_long_prompts"
    )
    with pytest.raises(BapoError, match=message):
        limit_lengths(config_of(limit), without_held_out(datasets), small_model)
    assert limit_lengths(config_of(longest), datasets, small_model) == datasets


def test_prompts_are_measured_with_the_date_that_they_will_have(
    datasets: RunDatasets, lengths: dict[str, int], small_model: Path, tmp_path: Path
) -> None:
    """The date of the configuration, which is not today's, has two digits more or less here."""
    model = tmp_path / "model"
    shutil.copytree(small_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = "{{ '12' if strftime_now('%d') == '26' }}" + tokenizer.get_chat_template()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    longest = max(lengths.values())
    other_day = config_of(longest, "rollout.prompt_date=2024-07-01")
    assert limit_lengths(other_day, datasets, model) == datasets
    with pytest.raises(BapoError, match=rf"the longest {longest + 2} "):
        limit_lengths(config_of(longest), datasets, model)


def test_a_mistake_in_rendering_names_the_prompt(
    datasets: RunDatasets, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(payload: dict[str, Any]) -> Any:
        return int("three")

    monkeypatch.setattr(CountdownTask, "render", staticmethod(mistaken))
    mistake = r"prompt countdown:.*: task countdown: render raised ValueError: .* \(test_lengths.py"
    with pytest.raises(BapoError, match=mistake):
        limit_lengths(config_of(99), datasets, small_model)


def test_they_are_left_out_on_request(
    datasets: RunDatasets, lengths: dict[str, int], limit: int, small_model: Path
) -> None:
    config = config_of(limit, "task.drop_long_prompts=true")
    train = limit_lengths(config, without_held_out(datasets), small_model).train
    kept = [uid for uid, length in lengths.items() if length <= limit]
    assert [prompt.uid for prompt in train.prompts] == kept
    left_out = len(lengths) - len(kept)
    assert train.summary == f"{len(kept)} prompts, {left_out} prompts left out as too long"
    assert train.name != datasets.train.name, "a dataset is named by its content"
    needed = config_of(limit, "task.drop_long_prompts=true", "rollout.prompts_per_step=60")
    number = len(kept)
    message = rf"there are {number} training prompts \({left_out} were left out as too long\), but"
    with pytest.raises(BapoError, match=message):
        limit_lengths(needed, without_held_out(datasets), small_model)


def test_held_out_prompts_are_never_left_out(datasets: RunDatasets, small_model: Path) -> None:
    config = config_of(3, "task.drop_long_prompts=true")
    with pytest.raises(BapoError, match=r"countdown makes: 5 of 5 have .*raise the limit$"):
        limit_lengths(config, datasets, small_model)


def test_a_prompt_that_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    for name, problem in (("train", "1+1="), ("test", "What is two plus three?")):
        rows = [{"problem": problem, "answer": "2"}]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    files = [f"task.{name}_path={tmp_path / name}.json" for name in ("train", "test")]
    one = ["rollout.prompts_per_step=1", "optimizer.minibatch_prompts=1", "task.name=math"]
    config = load_config(None, [*files, *one])
    datasets = load_datasets(config)
    with pytest.raises(BapoError, match=r'^prompt math:\w+ .\{"problem": "What is two'):
        limit_lengths(config, datasets, TINY_MODEL)


def test_data_of_files_are_named_by_their_key(tmp_path: Path, small_model: Path) -> None:
    long, short = {"nums": [11, 22, 33], "target": 66}, {"nums": [1, 2], "target": 3}
    held_out = {"nums": [4, 5], "target": 9}
    for name, rows in (("train", [long, short]), ("test", [held_out])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    files = [f"task.{name}_path={tmp_path / name}.json" for name in ("train", "test")]
    one = ["rollout.prompts_per_step=1", "optimizer.minibatch_prompts=1"]
    config = config_of(10, *files, *one)
    datasets = load_datasets(config)
    with pytest.raises(BapoError, match=r"task\.train_path: 1 of 2 have more tokens"):
        limit_lengths(config, RunDatasets(datasets.train, {}), small_model)


@pytest.mark.parametrize("both", [True, False])
def test_demonstrations_of_the_prompts_that_are_left_are_counted(
    both: bool, small_model: Path
) -> None:
    """If only prompts that are left out have one, the section would silently do nothing."""
    short = {"nums": [1, 2], "target": 3} | ({"demonstration": "1+2"} if both else {})
    long = {"nums": [11, 22, 33], "target": 66, "demonstration": "11+22+33"}
    prompts = [
        PromptItem(uid=f"countdown:{number}", task="countdown", payload=payload)
        for number, payload in enumerate((short, long))
    ]
    train = Dataset("countdown-train", prompts, demonstrated=1 + both)
    options = ["demonstrations.join=all", "task.drop_long_prompts=true"]
    one = ["rollout.prompts_per_step=1", "optimizer.minibatch_prompts=1"]
    config = config_of(10, *options, *one)
    if both:
        left = limit_lengths(config, RunDatasets(train, {}), small_model).train
        assert left.summary == ("1 prompts, 1 with a demonstration, 1 prompts left out as too long")
        return
    with pytest.raises(BapoError, match="those that have one have more than rollout"):
        limit_lengths(config, RunDatasets(train, {}), small_model)


def test_images_count_as_the_tokens_that_stand_for_them(tmp_path: Path) -> None:
    model = save_micro_vision_model(tmp_path)
    config = load_config(
        None,
        [
            *("task.name=geometry", "task.train_prompts=8", "task.test_prompts=4"),
            *("rollout.prompts_per_step=4", "optimizer.minibatch_prompts=4"),
            "rollout.max_prompt_tokens=2048",
        ],
    )
    datasets = load_datasets(config)
    assert limit_lengths(config, datasets, model) == datasets
    text = TASK.render(datasets.test["test"].prompts[0].payload)
    assert images_of(text)
    tokens = len(AutoTokenizer.from_pretrained(model).apply_chat_template(text)["input_ids"])
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": tokens})
    with pytest.raises(BapoError, match="4 of 4 have more tokens"):
        limit_lengths(config.model_copy(update={"rollout": rollout}), datasets, model)
