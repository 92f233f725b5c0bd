"""The progress of a run says when a run trains nothing, and why an engine fails."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest

from services.buffer.api.wire import ReplicaView
from services.cli.console import plain_console
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
    display = RunDisplay(plain_console(file=printed), "run", 9, done)
    for step, counts in enumerate(batches, start=done + 1):
        display.update([step_view(step=step, counts=counts)], [], [])
    assert printed.getvalue().count("trained nothing: the responses of each") == notes


@pytest.mark.parametrize(
    ("shares", "note"),
    [
        ([0.0, 0.009], ""),
        ([0.0, 0.25, 0.5], "the reward function failed on 25.0% of the responses of step 2"),
    ],
)
def test_a_reward_function_that_fails_is_noted_once(shares: list[float], note: str) -> None:
    printed = io.StringIO()
    display = RunDisplay(plain_console(file=printed), "run", 9, 0)
    for number, share in enumerate(shares, start=1):
        parts = {"answer": 0.5} | ({"failed": share} if share else {})
        display.update([step_view(step=number, counts=FULL, reward_parts=parts)], [], [])
    assert printed.getvalue().count("the reward function failed") == (1 if note else 0)
    assert note in printed.getvalue()


@pytest.mark.parametrize(("bins", "note"), [([3, 0, 0, 0, 1], True), ([3, 1, 0, 0, 0], False)])
def test_a_full_batch_without_mixed_groups_is_explained(bins: list[int], note: bool) -> None:
    printed = io.StringIO()
    display = RunDisplay(plain_console(file=printed, width=200), "run", 9, 0)
    parts = {"answer": 0.25}
    for step in (1, 2):
        display.update([step_view(step=step, counts=FULL, bins=bins, reward_parts=parts)], [], [])
    assert printed.getvalue().count("no group of step 1 had right and wrong responses") == note


def test_responses_that_are_cut_off_are_noted_once() -> None:
    printed = io.StringIO()
    display = RunDisplay(plain_console(file=printed, width=200), "run", 9, 0)
    for step, share in enumerate((0.5, 0.75, 0.8), start=1):
        metrics = {"responses/cut_off": share}
        display.update([step_view(step=step, counts=FULL, metrics=metrics)], [], [])
    assert printed.getvalue().count("75% of the responses of step 2 were cut off") == 1
    assert printed.getvalue().count("were cut off") == 1


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "detail", ["[rank0]: CUDA out of memory", "cannot load [/scratch/model.safetensors]"]
)
def test_an_error_of_an_engine_is_shown_as_it_is(detail: str, terminal: bool) -> None:
    printed = io.StringIO()
    console = plain_console(file=printed, width=200, force_terminal=terminal, color_system=None)
    display = RunDisplay(console, "run", 9, 0)
    replica = ReplicaView(
        name="engine-0",
        url="http://engine-0:8000",
        state="failing",
        detail=detail,
        loaded_version=0,
        last_seen=datetime.now(UTC),
        silent_s=0.0,
    )
    with display.shown():
        display.update([], [], [replica])
    assert f"engine-0: {detail}" in printed.getvalue()
