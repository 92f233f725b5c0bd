"""Reward functions are tried on rows and responses before a run begins."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from bapo_core.errors import RewardError
from bapo_core.reward_files import RewardFunctions
from services.verifier.api import trial
from services.verifier.api.trial import RESPONSES, try_functions
from services.verifier.api.wire import ItemVerdict, VerifyItem

FUNCTIONS = RewardFunctions.parse("rewards.py:score")
ROWS = [{"prompt": f"{number} apples " * 20, "answer": str(number)} for number in range(100)]


def verifier(*failing: int) -> tuple[list[int], Any]:
    """Returns the rows that a stand-in of the verifier is asked for, and the stand-in."""
    asked: list[int] = []

    def verify(_: str, options: dict[str, Any], items: list[VerifyItem]) -> list[list[ItemVerdict]]:
        assert options["source"] == "text"
        (item,) = items
        assert tuple(item.responses) == RESPONSES
        asked.append(int(item.payload["answer"]))
        status = "crashed" if asked[-1] in failing else "ok"
        verdict = ItemVerdict(reward=0.0, status=status, detail="raised ValueError")
        return [[verdict] * len(RESPONSES)]

    return asked, verify


def test_rows_are_tried_until_one_fails_whose_number_and_prompt_are_named() -> None:
    asked, verify = verifier(41, 61)
    with pytest.raises(RewardError) as refused:
        try_functions(FUNCTIONS, "text", ROWS, verify, count=100)
    assert asked == list(range(42))
    shown = ("41 apples " * 20)[:57]
    assert f"raised ValueError; tried with row 42 ('{shown}...') and the response ''" in str(
        refused.value
    )


def test_every_nth_row_is_tried_and_keeps_its_number() -> None:
    asked, verify = verifier()
    assert try_functions(FUNCTIONS, "text", ROWS, verify, count=10, every=9) == 10
    assert asked == list(range(0, 90, 9))
    _, verify = verifier(27)
    with pytest.raises(RewardError, match="tried with row 28 "):
        try_functions(FUNCTIONS, "text", ROWS, verify, count=10, every=9)


def test_slow_functions_are_tried_on_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Mock(side_effect=[0.0, 4.0, 12.0])
    monkeypatch.setattr(trial.time, "monotonic", clock)
    asked, verify = verifier()
    assert try_functions(FUNCTIONS, "text", ROWS, verify, count=100, within_s=10.0) == 2
    assert asked == [0, 1]
