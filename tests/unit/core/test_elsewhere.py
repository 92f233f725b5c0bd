"""Names of other systems lead to keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from bapo_core.config import PRESETS, RunConfig, load_config
from bapo_core.config.base import kinds_of
from bapo_core.config.changes import ConfigHistory
from bapo_core.config.elsewhere import ELSEWHERE, WITHOUT_KEY
from bapo_core.config.loader import nest
from bapo_core.errors import ConfigError
from bapo_core.spelling import did_you_mean


def keys_of(model: type, prefix: str = "") -> set[str]:
    """Returns the dotted keys of a section of any kind, and of the sections in it."""
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        kinds = kinds_of(model, name)
        sections = [*kinds.sections.values()] if kinds else [field.annotation]
        keys.add(prefix + name)
        for section in sections:
            if hasattr(section, "model_fields"):
                keys |= keys_of(section, f"{prefix}{name}.")
    return keys


def test_every_key_exists() -> None:
    assert {entry.key for entry in ELSEWHERE} <= keys_of(RunConfig)


def test_no_name_has_two_meanings_within_a_system() -> None:
    for system in ("trl", "verl", "prime_rl"):
        names = [name for entry in (*ELSEWHERE, *WITHOUT_KEY) for name in getattr(entry, system)]
        assert len(names) == len(set(names))


NAMES = [(name, entry.answer(name)) for entry in (*ELSEWHERE, *WITHOUT_KEY) for name in entry.names]


@pytest.mark.parametrize(("name", "answer"), NAMES)
@pytest.mark.parametrize("value", ["grpo", "1"])
def test_a_name_on_the_command_line_is_answered(name: str, answer: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(answer)} \(docs/coming-from.md\)"):
        load_config(None, ["steps=3", f"{name}={value}"])


@pytest.mark.parametrize(("name", "answer"), NAMES)
@pytest.mark.parametrize("overrides", [[], ["algorithm=grpo"]])
def test_a_name_in_a_file_is_answered(
    name: str, answer: str, overrides: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nest(name, 1)))
    with pytest.raises(ConfigError, match=rf"{re.escape(answer)} \(docs/coming-from.md\)"):
        load_config(file, overrides)


def test_each_key_of_a_section_of_another_system_is_answered() -> None:
    keys = ["algorithm.gamma=1.0", "algorithm.kl_ctrl.kl_coef=0", "algorithm.horizon=3"]
    with pytest.raises(ConfigError) as error:
        load_config(None, keys)
    assert str(error.value) == (
        "config: override algorithm.gamma: no such key; here it is advantage.gamma "
        "(docs/coming-from.md); override algorithm.kl_ctrl.kl_coef: no such key; here it is "
        "kl.coefficient (docs/coming-from.md); override algorithm.horizon: no such key; algorithm "
        "has a value and no keys, so write algorithm=VALUE"
    )


def test_a_section_in_place_of_the_algorithm_is_answered_when_a_run_goes_on() -> None:
    history = ConfigHistory(RunConfig())
    with pytest.raises(ConfigError, match=r"override algorithm.lam: .* here it is advantage.lam"):
        history.plan_change({"algorithm.lam": 0.9}, 1)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "per_device_train_batch_size",
            "here it is rollout.prompts_per_step, a number of prompts, not of responses",
        ),
        # verl counts prompts, too.
        ("data.train_batch_size", "here it is rollout.prompts_per_step (docs"),
        ("num_train_epochs", "here it is steps, a number of steps, not of epochs"),
        ("max_steps", "here it is steps (docs"),
        ("trainer.total_epochs", "here it is steps, a number of steps, not of epochs"),
        ("optimizer.warmup_ratio", "optimizer.warmup_steps, a number of steps, not a share of"),
        (
            "actor.ppo_micro_batch_size_per_gpu",
            "optimizer.microbatch_tokens, a number of tokens, not of responses",
        ),
    ],
)
def test_an_answer_says_that_the_value_has_another_unit(name: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_config(None, [f"{name}=3"])


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("task.system_prompt", "`task.options.system` of the task math"),
        ("system_prompt", "a list of chat messages, the first one with the role system"),
        ("report_to", "`bapo metrics RUN --wandb PROJECT` or `--tensorboard DIRECTORY`"),
        ("trainer.logger", "`bapo metrics RUN --wandb PROJECT`"),
        ("lr_scheduler_type", "there is no schedule but `optimizer.warmup_steps`"),
        ("optimizer.lr_scheduler_type", "there is no schedule but `optimizer.warmup_steps`"),
        ("logging_steps", "the metrics of every step are stored"),
    ],
)
def test_a_setting_without_a_key_is_answered_with_what_takes_its_place(
    name: str, answer: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(answer)}.* \(docs/coming-from.md\)"):
        load_config(None, [f"{name}=x"])


def test_a_system_prompt_beside_a_reward_function_is_told_its_place() -> None:
    task = ["task.reward=rewards.py:score", "task.options.system=Be brief."]
    with pytest.raises(ConfigError, match="a message with the role system in a prompt of the data"):
        load_config(None, task)
    with pytest.raises(ConfigError, match=r"a reward function has none$"):
        load_config(None, [task[0], "task.options.numbers=3"])


def test_units_are_of_names_in_the_table() -> None:
    for entry in ELSEWHERE:
        assert set(entry.units) <= set(entry.names)


def test_a_list_in_place_of_the_algorithm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: [grpo]")
    with pytest.raises(ConfigError, match=r"algorithm: .'grpo'. is not one of areal_async"):
        load_config(file)
    assert load_config(file, ["algorithm=grpo"]).algorithm == "grpo"


def test_letters_in_another_order_are_the_likeliest_slip() -> None:
    assert did_you_mean("gpro", PRESETS) == "; did you mean grpo?"
    assert did_you_mean("gsop", PRESETS) == "; did you mean gspo?"
    assert did_you_mean("pgo", ["opg", "pgx"], most=2) == "; did you mean opg or pgx?"
