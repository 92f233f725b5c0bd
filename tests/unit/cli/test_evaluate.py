"""`bapo eval` does not blame the model for a reward function that fails."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from bapo_core.tasks.countdown import CountdownTask
from services.cli.console import plain_console
from services.cli.evaluate import (
    PROMPTS_AT_ONCE,
    _note_cut_off,
    evaluate_directory,
    show_progress,
)
from services.model.resolve import TINY_MODEL
from services.rollout.api.wire import GeneratedGroup
from services.verifier.pool import VerifierPool


class Broken(VerifierPool):
    """Verifies with a reward function that raises for the first `failing` responses."""

    failing = 0

    def verify(self, task: str, options: Any, items: Any) -> Any:
        verdicts = super().verify(task, options, items)
        for verdict in verdicts[: self.failing]:
            verdict.status, verdict.detail = "crashed", "KeyError: 'target'"
        return verdicts


@pytest.mark.parametrize("failing", [3, 8])
def test_a_reward_function_that_fails_is_named(
    failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Broken, "failing", failing)
    monkeypatch.setattr("services.cli.evaluate.VerifierPool", Broken)
    overrides = ["task.options={template: short}", "task.test_prompts=4", "evaluation.samples=2"]
    config = load_config(None, [*overrides, "task.train_prompts=256"])
    said = f"the reward function of task {CountdownTask.name} failed on"
    if failing == 8:
        with pytest.raises(BapoError, match=f"{said} all of the 8 responses .*KeyError: 'target'"):
            evaluate_directory(config, TINY_MODEL)
        return
    evaluate_directory(config, TINY_MODEL)
    assert f"{said} 3 of the 8 responses" in capsys.readouterr().err


def test_a_mistake_in_rendering_names_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(payload: dict[str, Any]) -> Any:
        return payload["number"]

    monkeypatch.setattr(CountdownTask, "render", staticmethod(mistaken))
    config = load_config(None, ["task.test_prompts=4", "task.train_prompts=256"])
    mistake = (
        r"prompt countdown:.*: task countdown: render raised KeyError: 'number' \(test_evaluate"
    )
    with pytest.raises(BapoError, match=mistake):
        evaluate_directory(config, TINY_MODEL)


def test_an_evaluation_without_a_terminal_prints_how_far_it_is() -> None:
    printed, seconds = io.StringIO(), iter(range(0, 1_000, 6))
    console = plain_console(file=printed, force_terminal=False)
    starts = list(show_progress("math500", 500, console, clock=lambda: next(seconds)))
    assert starts == list(range(0, 500, PROMPTS_AT_ONCE))
    lines = printed.getvalue().splitlines()
    assert lines[:3] == [f"math500: {start} of 500 prompts" for start in (0, 32, 64)]
    assert len(lines) == len(starts) // 2


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["stop", "stop", "stop", "stop"], ""),
        (["stop", "length", "stop", "stop"], "1 of 4 responses to held_out"),
        (["length", "length", "stop", "length"], "3 of 4 responses to held_out"),
        (["stop"] * 4_999 + ["length"], "1 of 5,000 responses to held_out"),
    ],
)
def test_the_number_of_responses_that_are_cut_off_is_printed(
    reasons: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    responses = [{"token_ids": [1], "logprobs": [0.0], "finish_reason": why} for why in reasons]
    groups = [
        GeneratedGroup.model_validate(
            {"index": n, "policy_version": 1, "responses": responses[2 * n : 2 * n + 2]}
        )
        for n in range(len(reasons) // 2)
    ]
    _note_cut_off("held_out", groups, 256)
    printed = capsys.readouterr().err
    assert (said in printed) if said else not printed
    assert not said or " were cut off at 256 tokens (rollout.max_response_tokens)" in printed
    assert ("raise the limit" in printed) == (reasons.count("length") == 3)


def test_references_that_cannot_be_read_are_noted_before_the_evaluation(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "answer": r"\foo{2} + 1" if n == 3 else "4"} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["task.name=math", "evaluation.samples=1", "rollout.max_response_tokens=1"]
    config = load_config(
        None, [*overrides, f"evaluation.sets={{small: {{path: {file}}}}}", "task.train_prompts=256"]
    )
    notes: list[str] = []
    with suppress(BapoError):  # the tiny model's tokenizer has no letters
        evaluate_directory(config, TINY_MODEL, note=notes.append)
    (note,) = notes
    assert "the reference answers of 1 of 8, for example of row 4" in note
    assert "cannot be read as mathematics" in note
