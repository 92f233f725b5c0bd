"""Tests the configuration that the parameters of Kubeflow's form describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import load_config
from bapo_core.errors import ConfigError
from pipelines.configuration import COUNTDOWN, KEYS, read_config, read_fork
from services.buffer.api import wire

EXAMPLE = Path(__file__).parents[3] / "examples/countdown-vllm.yaml"
JOINED = " ".join(EXAMPLE.read_text().splitlines())
"""The example as a form leaves it that joins the lines of what is pasted."""


def read(
    config: object = COUNTDOWN,
    *,
    stored: str | None = None,
    overrides: object = (),
    **settings: Any,
) -> Any:
    overrides = list(overrides) if isinstance(overrides, tuple) else overrides
    return read_config("mine", config, stored, overrides, settings)


def as_floats(value: Any) -> Any:
    """Returns `value` as KFP passes it: every number is a float."""
    return json.loads(json.dumps(value), parse_int=float)


def test_numbers_arrive_as_floats_and_are_read_as_written() -> None:
    config = {**COUNTDOWN, "task": {"name": "countdown", "options": {"numbers": [3, 4]}}}
    read_back = read(as_floats(config))
    assert read_back == read(config)
    assert read_back.task.options["numbers"] == [3, 4]
    assert all(type(number) is int for number in read_back.task.options["numbers"])
    assert read_back.optimizer.learning_rate == 1e-4


def test_another_task_does_not_get_the_options_of_the_configured_one() -> None:
    assert read(task="math").task.options == {}
    assert read(task="countdown").task.options == {"template": "short"}


def test_each_parameter_of_the_form_sets_its_key() -> None:
    values: dict[str, Any] = {
        "model": "hf://Qwen/Qwen3-0.6B",
        "task": "math",
        "train_data": "train.jsonl",
        "test_data": "test.jsonl",
        "steps": 7.0,
        "learning_rate": 3e-6,
        "prompts_per_step": 32,
        "group_size": 4,
    }
    assert set(values) == set(KEYS)
    config = {key: value for key, value in COUNTDOWN.items() if key != "task"}
    dumped = read(config, **values).model_dump()
    for name, key in KEYS.items():
        value: Any = dumped
        for part in key.split("."):
            value = value[part]
        assert value == values[name], name


def test_an_empty_parameter_changes_nothing() -> None:
    empty = dict.fromkeys(KEYS, "") | {"steps": 0, "learning_rate": 0.0}
    assert read(**empty) == read()


def test_the_run_has_the_name_of_the_form() -> None:
    assert read({**COUNTDOWN, "name": "another"}).name == "mine"


def test_an_override_replaces_every_other_value() -> None:
    assert read(steps=7, overrides=["steps=9"]).steps == 9


def test_a_stored_configuration_replaces_the_default_one() -> None:
    assert read(stored=EXAMPLE.read_text()) == load_config(EXAMPLE, ["name=mine"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": JOINED}, r"config: must be a JSON object, .* joins the lines of pasted YAML"),
        ({"config": {}}, "config: holds no key, so every default would be trained"),
        ({"config": {"stepz": 3}}, "stepz: no such key; did you mean steps"),
        ({"stored": JOINED}, "stored_config: .* sets no key, .* the lines of the file were joined"),
        ({"stored": ""}, "stored_config: .* sets no key"),
        ({"stored": "steps: ["}, "stored_config: not valid YAML"),
        ({"config": {"steps": 3}, "stored": "steps: 4"}, "are both set"),
        ({"overrides": "steps=400"}, r'must be a JSON list of texts, such as \["steps=400"\]'),
        ({"overrides": [400]}, "must be a JSON list of texts"),
        ({"overrides": ["steps"]}, "write key=value"),
    ],
)
def test_invalid_parameters_of_the_form_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**arguments)


def fork(
    fork_of: str = "past",
    fork_step: int = 4,
    *,
    config: object = COUNTDOWN,
    stored: str = "",
    overrides: object = (),
    **settings: Any,
) -> wire.ForkRequest | None:
    overrides = list(overrides) if isinstance(overrides, tuple) else overrides
    return read_fork("mine", fork_of, fork_step, config, stored, overrides, settings)


def test_a_fork_changes_what_the_form_sets_and_nothing_else() -> None:
    """The defaults of the form, and of the configuration, are no values of the fork."""
    overrides = ("algorithm=grpo", "optimizer.learning_rate=1e-6", "name=other")
    form: dict[str, Any] = {"steps": 9.0, "learning_rate": 3e-6, "model": "", "group_size": 0.0}
    request = fork(config=as_floats(COUNTDOWN), overrides=overrides, **form)
    assert request == wire.ForkRequest(
        name="mine",
        step=4,
        values={"steps": 9, "optimizer": {"learning_rate": 1e-6}, "algorithm": "grpo"},
    )
    assert fork() == wire.ForkRequest(name="mine", step=4)
    assert fork("", 0, config={"steps": 3}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fork_step": 0}, "fork_of is 'past', but fork_step is 0; give the last step"),
        ({"fork_step": -1}, "but fork_step is -1"),
        ({"fork_of": ""}, "fork_step is 4, but fork_of is empty; give the name"),
        ({"fork_of": "Past run"}, "fork_of is 'Past run', which is no name of a run"),
        ({"fork_of": "mine"}, "bapo_run and fork_of are both 'mine'"),
        ({"config": {"steps": 3}}, "config and fork_of are both set, .* of run 'past'; leave"),
        ({"stored": "mine"}, "stored_config and fork_of are both set"),
        ({"overrides": "steps=400"}, "must be a JSON list of texts"),
        ({"overrides": ["steps"]}, "write key=value"),
    ],
)
def test_invalid_parameters_of_a_fork_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fork(**arguments)


def test_a_name_that_kubernetes_refuses_is_refused_before_anything_is_stored() -> None:
    with pytest.raises(ConfigError, match="'abc-': it ends with a hyphen"):
        read_config("abc-", COUNTDOWN, None, [], {})
