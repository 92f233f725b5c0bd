"""The progress of a run says when a run trains nothing, and why an engine fails."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from services.buffer.api.wire import (
    Evaluation,
    ReplicaState,
    ReplicaView,
    RolloutProgress,
    RunProgress,
)
from services.cli.console import plain_console
from services.cli.progress import RunDisplay, describe_activity
from tests.unit.buffer.test_step_view import step_view


def engine(state: ReplicaState, detail: str = "", silent_s: float = 0.0) -> ReplicaView:
    return ReplicaView(
        name="engine-0",
        url="http://engine-0:8000",
        state=state,
        detail=detail,
        loaded_version=0,
        last_seen=datetime.now(UTC),
        silent_s=silent_s,
    )


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
    assert printed.getvalue().count("no group of step 1 had a signal: the responses of") == note


@pytest.mark.parametrize(
    ("solved_at", "bins", "note"),
    [
        (
            None,
            [4, 0, 0, 0, 0],
            "note: step 2: no response counts as correct, although rewards differ (mean 0.846): "
            "groups train, but all prompts seem equally hard to what goes by the accuracy k/G "
            "(buffers, replay window, adaptive samplers, evaluations); set task.solved_at to the "
            "reward from which a response counts as correct",
        ),
        (
            1.5,
            [4, 0, 0, 0, 0],
            "no response has a reward of task.solved_at=1.5 or more, although rewards differ",
        ),
        (None, [0, 0, 0, 0, 4], "every response counts as correct, although rewards differ"),
        (-1.0, [0, 0, 0, 0, 4], "; raise task.solved_at in a new run"),
        (1.5, [3, 1, 0, 0, 0], ""),
    ],
)
def test_rewards_that_no_threshold_divides_are_explained_once(
    solved_at: float | None, bins: list[int], note: str
) -> None:
    printed = io.StringIO()
    console = plain_console(file=printed, width=400)
    display = RunDisplay(console, "run", 9, 0, solved_at=solved_at)
    equal = step_view(step=1, counts=FULL | {"mixed": 0}, bins=[4, 0, 0, 0, 0])
    display.update([equal], [], [])
    for step in (2, 3):
        counts = FULL | {"mixed": 2}
        parts = {"answer": 0.846}
        display.update([step_view(step=step, counts=counts, bins=bins, reward_parts=parts)], [], [])
    assert note in printed.getvalue()
    assert printed.getvalue().count("although rewards differ") == (1 if note else 0)
    assert "step 3" not in printed.getvalue().replace("step 3/9", "")


def test_different_formats_of_wrong_answers_need_no_threshold() -> None:
    printed = io.StringIO()
    display = RunDisplay(plain_console(file=printed, width=400), "run", 9, 0)
    parts = {"answer": 0.0, "format": 0.5}
    counts = FULL | {"mixed": 2}
    display.update([step_view(counts=counts, bins=[4, 0, 0], reward_parts=parts)], [], [])
    assert "note" not in printed.getvalue()


def test_a_filter_that_drops_groups_with_a_signal_is_named() -> None:
    printed = io.StringIO()
    display = RunDisplay(plain_console(file=printed, width=400), "run", 9, 0)
    display.update([step_view(counts=EMPTY | {"mixed": 2}, bins=[6, 1, 1])], [], [])
    assert (
        "note: step 1 trained nothing: the online filter (fresh.filter) kept none of the 2 groups "
        "whose rewards differ, of 8"
    ) in printed.getvalue()


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
    replica = engine("failing", detail)
    with display.shown():
        display.update([], [], [replica])
    assert f"engine-0: {detail}" in printed.getvalue()


def fresh(groups: int, step: int = 1) -> RolloutProgress:
    return RolloutProgress(kind="fresh", step=step, groups=groups, expected=8)


def evaluation(groups: int, version: int = 1) -> RolloutProgress:
    return RolloutProgress(
        kind="evaluation", step=version, evaluation_set="test", groups=groups, expected=30
    )


@pytest.mark.parametrize(
    ("state", "silent_s", "newest_version", "has_batch", "rollouts", "activity"),
    [
        ("starting", 0, 0, False, [fresh(0)], "starting the engine and the trainer"),
        ("loading", 0, 1, False, [fresh(0)], "loading the weights into the engine"),
        ("serving", 11, 1, False, [fresh(0)], "starting the engine"),
        ("serving", 0, 1, False, [fresh(0), evaluation(0)], "step 1: 0 of 8 groups"),
        (
            "serving",
            0,
            1,
            False,
            [fresh(5), evaluation(12)],
            "step 1: 5 of 8 groups; evaluating the base model on test: 12 of 30 prompts",
        ),
        ("serving", 0, 1, True, [evaluation(0)], "training step 1"),
        ("loading", 0, 1, True, [], "training step 1; loading the weights into the engine"),
    ],
)
def test_the_activity_of_a_run_is_named(
    state: ReplicaState,
    silent_s: float,
    newest_version: int,
    has_batch: bool,
    rollouts: list[RolloutProgress],
    activity: str,
) -> None:
    progress = RunProgress(
        step=1, has_batch=has_batch, newest_version=newest_version, rollouts=rollouts
    )
    assert describe_activity(progress, [engine(state, silent_s=silent_s)], 9) == activity


@pytest.mark.parametrize(
    ("rollouts", "activity"),
    [
        ([evaluation(0, 10)], "evaluating version 10 on test: 0 of 30 prompts"),
        ([], "storing the last checkpoint"),
    ],
)
def test_the_activity_after_the_last_step_is_named(
    rollouts: list[RolloutProgress], activity: str
) -> None:
    progress = RunProgress(step=10, has_batch=False, newest_version=10, rollouts=rollouts)
    assert describe_activity(progress, [engine("serving")], 9) == activity


def at(groups: int, step: int = 1) -> RunProgress:
    return RunProgress(step=step, has_batch=False, newest_version=1, rollouts=[fresh(groups, step)])


def test_without_a_terminal_the_first_step_is_reported_while_it_goes_on() -> None:
    printed, now = io.StringIO(), [0.0]
    display = RunDisplay(plain_console(file=printed, width=200), "run", 9, 0, clock=lambda: now[0])
    for seconds, groups in ((0, 0), (5, 1), (11, 2), (22, 2), (33, 8)):
        now[0] = seconds
        display.update([], [], [engine("serving")], at(groups))
    assert printed.getvalue().splitlines() == [
        "step 1: 0 of 8 groups",
        "step 1: 2 of 8 groups",
        "step 1: 8 of 8 groups",
    ]


def test_without_a_terminal_later_steps_are_reported_when_they_take_a_minute() -> None:
    printed, now = io.StringIO(), [0.0]
    display = RunDisplay(plain_console(file=printed, width=200), "run", 9, 0, clock=lambda: now[0])
    now[0] = 11
    counts = {"fresh": 4, "reevaluated": 0, "replayed": 0}
    step = step_view(step=1, counts=counts, bins=[3, 1, 0, 0, 0])
    display.update([step], [], [engine("serving")], at(0, 2))
    for seconds in (40, 72):
        now[0] = seconds
        display.update([], [], [engine("serving")], at(3, 2))
    first, second = printed.getvalue().splitlines()
    assert first.startswith("step 1/9  reward")
    assert "? tok/s" in first
    assert second == "step 2: 3 of 8 groups"


def test_a_terminal_shows_the_activity_and_its_seconds() -> None:
    printed, now = io.StringIO(), [0.0]
    console = plain_console(file=printed, width=200, force_terminal=True, color_system=None)
    display = RunDisplay(console, "run", 9, 0, clock=lambda: now[0])
    with display.shown():
        display.update([], [], [engine("serving")], at(5))
        now[0] = 7.0
        display.update([], [], [engine("serving")], at(5))
    assert "step 1: 5 of 8 groups (7 s)" in printed.getvalue()


def test_the_accuracy_of_the_base_model_is_printed_before_the_first_step() -> None:
    printed = io.StringIO()
    display = RunDisplay(plain_console(file=printed, width=200), "run", 9, 0)
    base = Evaluation(
        version=1,
        evaluation_set="test",
        mean_accuracy=0.25,
        mean_reward=0.25,
        bins=[3, 1],
        prompts=4,
        tokens=9,
        scores=[],
    )
    for _ in range(2):
        display.update([], [base], [engine("serving")], at(0))
    assert printed.getvalue().count("held-out accuracy 0.250 (base)") == 1
    newer = base.model_copy(update={"version": 6, "mean_accuracy": 0.5, "mean_reward": 0.5})
    counts = {"fresh": 4, "reevaluated": 0, "replayed": 0}
    display.update([step_view(step=9, counts=counts)], [base, newer], [], None)
    assert "accuracy 0.500 (version 6; base 0.250)" in printed.getvalue()
    newer = newer.model_copy(update={"mean_reward": 1.5})
    display.update([step_view(step=9, counts=counts)], [base, newer], [], None)
    expected = "accuracy 0.500, reward 1.500 (version 6; base 0.250, reward 0.250)"
    assert expected in printed.getvalue()


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    updated: list[dict[str, str]] = []

    def display(content: dict[str, str], **options: bool) -> SimpleNamespace:
        assert options == {"raw": True, "display_id": True}
        shown.append(content)
        return SimpleNamespace(update=lambda new, **_: updated.append(new))

    monkeypatch.setattr("IPython.display.display", display)
    run = RunDisplay(plain_console(force_jupyter=True), "words", 3, 0, clock=lambda: 0.0)
    with run.shown():
        run.update([], [], [])
        for step in (1, 2, 3):
            counts = FULL | {"reevaluated": 0, "replayed": 0}
            run.update([step_view(step=step, counts=counts, bins=[1, 1, 1])], [], [])
    assert len(shown) == 1
    assert "words" in shown[0]["text/plain"]
    for number, content in enumerate(updated, start=1):
        for text in content.values():
            assert f"step {number}/3" in text
            assert "\u2501" in text, "a bar"
    assert len(updated) == 3, "what has not changed is not drawn again"


def test_what_happened_last_is_drawn_when_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    now = [0.0]

    def display(content: dict[str, str], **_: bool) -> SimpleNamespace:
        return SimpleNamespace(update=lambda new, **_: drawn.append(new["text/plain"]))

    monkeypatch.setattr("IPython.display.display", display)
    run = RunDisplay(plain_console(force_jupyter=True), "words", 3, 0, clock=lambda: now[-1])

    def fail() -> None:
        with run.shown():
            now.append(77.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    (last,) = drawn
    assert "(77 s)" in last
