"""Addresses of reward functions, and what the text of their file must have; it is never run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo_core.config import RunConfig, config_from, load_config
from bapo_core.errors import BapoError, ConfigError, TaskError
from bapo_core.reward_files import RewardFunctions
from bapo_core.selection import check_selection
from bapo_core.tasks import FunctionTask, get_task

DIGEST = "a" * 64


def load(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides))


def test_a_reward_names_the_task() -> None:
    config = load("task.reward=dir/rewards.py:score")
    assert (config.task.name, config.task.reward) == ("function", "dir/rewards.py:score")
    assert config_from(config.model_dump(mode="json")) == config
    check_selection(config)


def test_functions_of_a_list_share_file_and_digest() -> None:
    functions = RewardFunctions.parse([f"r.py:score@{DIGEST}", f"r.py:length@{DIGEST}"])
    assert functions == RewardFunctions("r.py", ("score", "length"), DIGEST)
    assert functions.addresses == [f"r.py:score@{DIGEST}", f"r.py:length@{DIGEST}"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["task.reward=rewards:score"], "write file.py:function, for example rewards.py:score"),
        (["task.reward=rewards.py"], "write file.py:function"),
        (["task.reward=r.py:score@abc"], "write file.py:function"),
        (["task.reward=[]"], "names no function"),
        (["task.reward=[a.py:score, b.py:length]"], "put them into one file"),
        (["task.reward=[a.py:score, a.py:score]"], "names score twice"),
        (["task.reward=[a.py:score, a.py:Length2]"], "at most 40 lower-case letters"),
        (["task.reward=[a.py:score, a.py:overlong]"], "none of answer, failed, overlong"),
        (["task.reward=[a.py:score, a.py:length]"], "set reward.weights.length=1"),
        (["task.reward=a.py:score", "task.name=math"], "beside name=math; remove one"),
        (["task.reward=a.py:score", "task.options={x: 1}"], "options are set beside reward"),
        (["task.name=function"], "set task.reward to file.py:function"),
        (
            ["task.reward=a.py:score", "evaluation.sets.x={path: a.jsonl, options: {source: x}}"],
            "evaluation.sets.x.options are set beside task.reward",
        ),
    ],
)
def test_a_reward_that_cannot_be_meant_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*overrides)
    assert reason in str(refused.value)


def test_a_weight_makes_a_further_function_count() -> None:
    config = load("task.reward=[a.py:score, a.py:length]", "reward.weights.length=0.5")
    check_selection(config)
    with pytest.raises(ConfigError, match="names 'format'"):
        check_selection(load("task.reward=a.py:score", "reward.weights.format=1"))


@pytest.mark.parametrize(
    "text",
    [
        "def score(completions, **columns): ...",
        "def score(completions): ...",
        "def score(prompts, completions, answer, **kwargs): ...",
        "def score(**everything): ...",
        "def score(completions, *, answer, log_extra=None, **kwargs): ...",
        "async def score(completions, **columns): ...",
        "try:\n    import x\nexcept ImportError:\n    def score(completions): ...",
        "if 1:\n    score = lambda completions, **columns: [1.0]",
        "from trl.rewards import accuracy_reward as score",
    ],
)
def test_signatures_of_trl_are_accepted(text: str) -> None:
    RewardFunctions.parse("rewards.py:score").check_text(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def score(completions:\n", "rewards.py, line 1: "),
        ("\0", "rewards.py"),
        ("", "rewards.py has no function score; its functions are none"),
        (
            "def scores(completions): ...\nX = 1",
            "has no function score; did you mean scores? its functions are scores",
        ),
        ("def score(text): ...", "line 1: score has no argument completions; write `def score("),
        ("def score(completions, /): ...", "by position only"),
        ("\ndef score(completions, completion_ids): ...", "line 2: score needs completion_ids"),
        ("class A:\n    def score(completions): ...", "no function score"),
    ],
)
def test_a_text_without_the_function_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RewardFunctions.parse("rewards.py:score").check_text(text)
    assert reason in str(refused.value)


def test_arguments_without_a_default_are_required_columns() -> None:
    text = """
def score(prompts, completions, answer, level=1, *, unit, source=None, **kwargs): ...
def length(completions, **kwargs): ...
"""
    functions = RewardFunctions.parse(["r.py:score", "r.py:length"])
    assert functions.required_columns(text) == {"score": ["answer", "unit"], "length": []}


def test_checking_a_text_does_not_run_it(tmp_path: Path) -> None:
    written = tmp_path / "written"
    text = f"open({str(written)!r}, 'w').close()\ndef score(completions): ..."
    functions = RewardFunctions.parse("r.py:score")
    functions.check_text(text)
    functions.required_columns(text)
    assert not written.exists()


# ---- rows ---------------------------------------------------------------------------------------


def task() -> FunctionTask:
    built = get_task("function", reward="rewards.py:score")
    assert isinstance(built, FunctionTask)
    return built


def test_a_uid_is_a_digest_of_prompt_and_columns() -> None:
    first = task().parse_row({"prompt": "a", "x": 1, "y": [2.5]})
    assert first == {"prompt": "a", "columns": {"x": 1, "y": [2.5]}}
    same = task().parse_row({"y": [2.5], "prompt": "a", "x": 1})
    other = task().parse_row({"prompt": "a", "x": 2, "y": [2.5]})
    assert first is not None
    assert same is not None
    assert other is not None
    assert task().uid(first) == task().uid(same) != task().uid(other)
    assert task().uid(first) == "function:e6f32af3d22e9292ce2fa93a"


def test_prompts_are_texts_or_chat_messages() -> None:
    text = task().parse_row({"prompt": "Hello"})
    assert text is not None
    assert task().render(text) == [{"role": "user", "content": "Hello"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    nulls = [{**message, "tool_calls": None} for message in messages]
    chat = task().parse_row({"prompt": nulls})
    assert chat is not None
    assert task().render(chat) == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ""}, "prompt is ''; make it a text, or a list of chat messages"),
        ({"prompt": None}, "prompt is None"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": ["Hello"]}, "prompt[0] is 'Hello'"),
        ({"prompt": [{"role": "robot", "content": "Hello"}]}, "one of the roles system, user"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt[0] is"),
        (
            {"prompt": "a", "picture": {"bytes": b"x"}},
            "the column picture.bytes holds b'x' (bytes)",
        ),
        ({"prompt": "a", "x": [1.0, float("nan")]}, "the column x[1] holds nan"),
        ({"prompt": "a", "completions": "x"}, "the column completions has the name of an argument"),
    ],
)
def test_a_row_that_no_function_can_take_is_refused(row: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        task().parse_row(row)


def test_no_process_of_a_run_verifies_by_a_function() -> None:
    with pytest.raises(TaskError, match="run in the verifier only"):
        task().verify({"prompt": "a", "columns": {}}, "b")


def test_a_text_has_no_way_into_a_run_but_the_verifier() -> None:
    with pytest.raises(BapoError):
        get_task("function", reward="rewards.py:score", source="print()")
