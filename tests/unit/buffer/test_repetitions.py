"""A commit says how often responses of its step were sampled or scored again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.buffer.steps.commits import _count_responses


def test_a_commit_counts_repetitions_in_all_and_by_cause() -> None:
    groups = [
        SimpleNamespace(size=4, cut_off=1, repeated={"verifier_lost": 2}),
        SimpleNamespace(size=4, cut_off=None, repeated={}),
        SimpleNamespace(size=8, cut_off=3, repeated={"verifier_lost": 1, "engine_lost": 5}),
    ]
    answer = SimpleNamespace(all=lambda: groups)
    run: Any = SimpleNamespace(id=1, session=SimpleNamespace(execute=lambda _: answer))
    assert _count_responses(run, 3) == {
        "responses/cut_off": 0.25,
        "rollouts/repeated": 8.0,
        "rollouts/repeated/verifier_lost": 3.0,
        "rollouts/repeated/engine_lost": 5.0,
    }
