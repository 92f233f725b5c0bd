"""The progress of a run says when a run trains nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.progress import RunDisplay
from tests.unit.buffer.test_step_view import step_view

EMPTY, FULL = {"fresh": 0, "rolled_out": 8}, {"fresh": 4, "rolled_out": 8}


@pytest.mark.parametrize(
    ("batches", "done", "notes"),
    [
        ([EMPTY, EMPTY, FULL, EMPTY], 0, 1),
        ([FULL, EMPTY], 0, 0),
        ([EMPTY], 5, 0),
    ],
)
def test_the_first_step_that_trains_nothing_is_explained(
    batches: list[dict[str, int]], done: int, notes: int
) -> None:
    printed = io.StringIO()
    display = RunDisplay(Console(file=printed), "run", 9, done)
    for step, counts in enumerate(batches, start=done + 1):
        display.update([step_view(step=step, counts=counts)], [], [])
    assert printed.getvalue().count("trained nothing: the responses of each") == notes
