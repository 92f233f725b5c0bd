"""Commands with the same runs share them: each run is trained by one of them at a time."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from rich.console import Console

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.cli import shared_runs
from services.cli.run_lock import RunLock
from services.cli.shared_runs import EndedRun, train_runs
from services.cli.variants import PlannedRun

Training = Callable[[PlannedRun], bool]


def plan(count: int) -> list[PlannedRun]:
    return [PlannedRun(f"v{k}", RunConfig(name=f"run-{k}", seed=k)) for k in range(count)]


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the stack; returns what happened to it."""
    events: list[str] = []

    @contextmanager
    def find_or_start_stack(*_: object) -> Iterator[Mock]:
        events.append("started")
        try:
            yield Mock(buffer_url="http://127.0.0.1:8700", token="t0ken")
        finally:
            events.append("left")

    monkeypatch.setattr(shared_runs, "find_or_start_stack", find_or_start_stack)
    monkeypatch.setattr(shared_runs, "find_stack", lambda _: Mock())
    monkeypatch.setattr(shared_runs, "POLL_INTERVAL_S", 0.01)
    return events


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[Training], None]:
    """Replaces the training of a run by a function that returns whether it had to be trained."""

    def replace(train: Training) -> None:
        def train_run(planned: PlannedRun, *_: object) -> tuple[Mock, bool]:
            return Mock(label=planned.label), train(planned)

        monkeypatch.setattr(shared_runs, "train_run", train_run)

    return replace


def call(runs: list[PlannedRun], home: Path) -> tuple[list[EndedRun], str]:
    console = Console(file=io.StringIO(), width=200)
    ended = list(train_runs(runs, home=home, console=console, port=0))
    assert isinstance(console.file, io.StringIO)
    return ended, console.file.getvalue()


@pytest.mark.usefixtures("stacks")
def test_a_run_that_another_command_trains_comes_last(
    tmp_path: Path, training: Callable[[Training], None]
) -> None:
    runs = plan(3)
    other = RunLock(tmp_path, "run-0")
    assert other.acquire()
    trained: list[str] = []

    def train(planned: PlannedRun) -> bool:
        trained.append(planned.config.name)
        if len(trained) == 2:
            # The command waits for the other one, which ends a moment later.
            threading.Timer(0.2, other.close).start()
        return planned.config.name != "run-0"

    training(train)
    ended, printed = call(runs, tmp_path)
    assert trained == ["run-1", "run-2", "run-0"]
    assert [each.planned for each in ended] == [runs[1], runs[2], runs[0]]
    assert [each.was_trained for each in ended] == [True, True, False]
    assert "trains what is left, such as run-0" in printed
    assert next(line for line in printed.splitlines() if line.startswith("run ")).startswith(
        "run 2 of 3: v1, seed 1"
    )


@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize("seed", range(5))
def test_each_run_is_trained_once_by_any_number_of_commands(
    tmp_path: Path, training: Callable[[Training], None], seed: int
) -> None:
    random, runs = Random(seed), plan(12)
    busy: set[str] = set()
    finished: list[str] = []
    lock = threading.Lock()
    pauses = {run.config.name: random.uniform(0, 0.02) for run in runs}

    def train(planned: PlannedRun) -> bool:
        name = planned.config.name
        with lock:
            assert name not in busy
            if name in finished:
                return False
            busy.add(name)
        time.sleep(pauses[name])
        with lock:
            busy.remove(name)
            finished.append(name)
        return True

    training(train)
    ended: dict[int, list[EndedRun]] = {}

    def command(number: int) -> None:
        ended[number] = call(runs, tmp_path)[0]

    threads = [threading.Thread(target=command, args=(k,)) for k in range(random.randint(2, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted(run.config.name for run in runs)
    assert sorted(finished) == names
    assert len(ended) == len(threads)
    for each in ended.values():
        assert sorted(run.planned.config.name for run in each) == names
        assert all(run.error is None and run.result is not None for run in each)


def test_a_run_that_fails_is_let_go_and_the_stack_is_started_anew_only_if_it_ended(
    tmp_path: Path,
    stacks: list[str],
    training: Callable[[Training], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = plan(3)

    def train(planned: PlannedRun) -> bool:
        if planned.label == "v0":
            raise BapoError("disk full")
        return True

    training(train)
    ended, _ = call(runs, tmp_path)
    assert [str(run.error) for run in ended] == ["disk full", "None", "None"]
    assert ended[0].result is None
    assert stacks == ["started", "left"]
    assert RunLock(tmp_path, "run-0").acquire()
    stacks.clear()
    monkeypatch.setattr(shared_runs, "find_stack", lambda _: None)
    call(runs, tmp_path / "other")
    assert stacks == ["started", "left"] * 2


def test_the_time_left_is_that_of_runs_which_were_not_finished_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(shared_runs.time, "monotonic", clock)
    pace, planned = shared_runs._Pace(), plan(1)[0]
    clock.return_value = 5.0
    pace.count(EndedRun(planned, Mock(), was_trained=False))
    assert pace.describe_time_left(4) == ""
    clock.return_value = 125.0
    pace.count(EndedRun(planned, Mock(), was_trained=True))
    assert pace.describe_time_left(4) == ", about 8 min left"
    # Another command has trained this one meanwhile.
    pace.count(EndedRun(planned, Mock(), was_trained=False))
    assert pace.describe_time_left(4) == ", about 4 min left"


def test_the_other_commands_are_stopped_before_the_stack_that_they_use(
    tmp_path: Path,
    stacks: list[str],
    training: Callable[[Training], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(Mock):
        """A command that uses the stack until it is stopped."""

        def stop(self, within_s: float) -> None:
            assert within_s == shared_runs.STOPPED_WITHIN_S
            stacks.append("other stopped")

    commands: list[list[str]] = []

    def start(command: list[str], *, log: Path) -> Other:
        commands.append(command)
        assert log.name == "job-2.log"
        stacks.append("other started")
        return Other()

    def interrupted(_: PlannedRun) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_runs, "ChildProcess", start)
    monkeypatch.setattr(sys, "argv", ["bapo", "compare", "my.yaml"])
    training(interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(train_runs(plan(2), home=tmp_path, console=Console(quiet=True), port=0, jobs=2))
    assert stacks == ["started", "other started", "other stopped", "left"]
    assert commands[0][-5:] == ["services.cli", "compare", "my.yaml", "--jobs", "1"]
