"""`bapo eval` does not blame the model for a reward function that fails."""

from __future__ import annotations

import io
from typing import Any

import pytest

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from bapo_core.tasks.countdown import CountdownTask
from services.cli.console import plain_console
from services.cli.evaluate import PROMPTS_AT_ONCE, evaluate_directory, show_progress
from services.model.resolve import TINY_MODEL
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
