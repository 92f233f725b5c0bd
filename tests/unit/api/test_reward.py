"""Reward functions of a script or a notebook become the file that a run stores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas
import pytest

import bapo
from bapo.api import _load
from bapo.reward import write_functions
from bapo_core.errors import BapoError, ConfigError

CONFIG = Path(__file__).parents[3] / "examples/countdown.yaml"


def score(completions: list[str], **columns: Any) -> list[float]:
    import math

    return [math.floor(len(text)) / 10 for text in completions]


def brackets(completions: list[str], **columns: Any) -> list[float]:
    return [value > 1 for value in score(completions)]


def needs_more(completions: list[str], **columns: Any) -> list[float]:
    return [math.pi * len(CONFIG.name) for _ in completions]


def test_the_file_has_the_functions_and_runs_alone(tmp_path: Path) -> None:
    names = write_functions([score, brackets], tmp_path)
    (file,) = tmp_path.iterdir()
    assert names == [f"{file}:score", f"{file}:brackets"]
    names_of_file: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names_of_file)
    assert names_of_file["score"](["12345"]) == [0.5]
    assert names_of_file["brackets"](["12345"]) == [False]


def test_the_same_functions_are_the_same_file(tmp_path: Path) -> None:
    assert write_functions([score], tmp_path) == write_functions([score], tmp_path)
    assert write_functions([score], tmp_path) != write_functions([score, brackets], tmp_path)


def test_a_function_that_uses_what_the_verifier_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs_more uses CONFIG, math, which the verifier's"):
        write_functions([needs_more], tmp_path)
    with pytest.raises(ConfigError, match="brackets uses score"):
        write_functions([brackets], tmp_path)
    limit = 3

    def closes_over(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text) > limit) for text in completions]

    with pytest.raises(ConfigError, match="closes_over uses limit"):
        write_functions([closes_over], tmp_path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **_: [0.0], "'<lambda>' is no function with a name"),
        (len, "'len' is no function with a name"),
        (score.__call__, "is no function with a name"),
    ],
)
def test_what_has_no_source_is_refused(function: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_functions([function], tmp_path)


def test_keys_are_laid_over_a_file_or_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_HOME", str(tmp_path))
    changed = _load(CONFIG, {"steps": 3, "optimizer.learning_rate": 1e-3}, None)
    assert (changed.steps, changed.optimizer.learning_rate) == (3, 1e-3)
    values = {"task": {"train_path": "a.jsonl", "test_path": "b.jsonl"}}
    with_reward = _load(values, {"reward.weights": {"brackets": 1}}, [score, brackets])
    assert isinstance(with_reward.task.reward, list)
    assert with_reward.task.reward[0].endswith(":score")
    with pytest.raises(ConfigError, match=r"sync\.evry: no such key"):
        _load(values, {"sync.evry": 3}, None)


def test_a_model_is_evaluated_to_a_data_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_HOME", str(tmp_path))
    file = tmp_path / "responses.jsonl"
    changes = {"task.test_prompts": 4, "evaluation.samples": 2}
    frame = bapo.evaluate("tiny", CONFIG, changes, responses=file)
    stored = pandas.read_json(file, lines=True)
    assert len(stored) == 4 * 2
    assert stored["correct"].mean() == frame.loc["test", "accuracy"]
    assert list(frame.index) == ["test"]
    assert frame.loc["test", "prompts"] == 4
    assert frame.loc["test", "accuracy"] == frame.loc["test", "mean@2"]


def test_an_evaluation_notes_references_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAPO_HOME", str(tmp_path))
    file = tmp_path / "test.jsonl"
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "10+5", "answer": "10+5=15"}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = {"task": {"name": "math", "test_path": str(file)}}
    with pytest.raises(BapoError, match="tokenizer cannot encode"):  # It is that of Countdown.
        bapo.evaluate("tiny", values, {"evaluation.samples": 1})
    assert "row 2: 10+5=15 is an equation of numbers" in capsys.readouterr().out
