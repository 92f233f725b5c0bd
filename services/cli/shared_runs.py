"""Trains planned runs on the local stack. Commands that train the same runs share them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.cli.local_run import REPORTS, LocalRun, create_run, execute
from services.cli.reward_files import pin_reward
from services.cli.run_lock import RunLock
from services.cli.service import format_addresses, open_local_object_store
from services.cli.variants import PlannedRun
from services.common.process import ChildProcess, describe_exit, python_command
from services.datasets import data_addresses, pin_revisions
from services.model.resolve import ensure_model, pin_model
from services.stack.stack import Endpoints, find_or_start_stack, find_stack

if TYPE_CHECKING:
    from services.report.comparison import RunResult

POLL_INTERVAL_S = 1.0
STOPPED_WITHIN_S = 60.0
"""Seconds within which a command beside this one has stopped its run."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A planned run that is finished, or that has failed."""

    planned: PlannedRun
    result: RunResult | None = None
    """None for a run that has failed."""
    was_trained: bool = False
    """Whether this command trained it; otherwise it was finished when its turn came."""
    error: BapoError | None = None
    """Why it failed."""


def train_runs(
    runs: Sequence[PlannedRun], *, home: Path, console: Console, port: int, jobs: int = 1
) -> Generator[EndedRun, None, None]:
    """Trains the runs that are not finished, one after another; yields each when it has ended.

    A run that another command trains comes last, once that command has let go of it: two commands
    with the same runs train two at a time. The stack is started anew if it ended with a run that
    failed.

    jobs: runs that are trained at a time; this process's command is started `jobs` - 1 more times.

    Raises `BapoError` when the stack does not start.
    """
    waiting, pace = list(runs), _Pace()
    while waiting:
        # The other commands use this one's stack, and are stopped before it.
        with (
            find_or_start_stack(home, port) as endpoints,
            _same_command_beside(jobs, home, console) as others,
        ):
            addresses = format_addresses(endpoints, home, with_token=console.is_terminal)
            console.print(addresses, soft_wrap=True)
            while waiting:
                planned, lock = _take_run(waiting, home, console)
                console.print(
                    f"run {runs.index(planned) + 1} of {len(runs)}: {planned.label}, seed "
                    f"{planned.config.seed}{pace.describe_time_left(len(waiting) + 1)}",
                )
                ended = _train(planned, lock, endpoints, home, console)
                pace.count(ended)
                yield ended
                if ended.error is not None and find_stack(home) is None:
                    break
            else:
                _wait_for(others, console)


class _Pace:
    """How fast runs end, whichever command trains them."""

    def __init__(self) -> None:
        self._began, self._ended, self._trained = time.monotonic(), 0, False

    def count(self, ended: EndedRun) -> None:
        """Counts a run that has ended. Runs that were finished from the start tell nothing."""
        if not self._trained and not ended.was_trained:
            self._began = time.monotonic()
            return
        self._trained = True
        self._ended += 1

    def describe_time_left(self, runs: int) -> str:
        """Estimates the time until `runs` more have ended."""
        if not self._ended:
            return ""
        minutes = (time.monotonic() - self._began) / self._ended * runs / 60
        return f", about {max(1, round(minutes))} min left"


def _take_run(
    waiting: list[PlannedRun], home: Path, console: Console
) -> tuple[PlannedRun, RunLock]:
    """Removes the first run that no other command trains; returns it, and its lock, acquired.

    Waits while other commands train all of them.
    """
    announced = False
    while True:
        for index, planned in enumerate(waiting):
            lock = RunLock(home, planned.config.name)
            if lock.acquire():
                return waiting.pop(index), lock
        if not announced:
            console.print(
                f"waiting: {lock.holder()} trains what is left, such as {planned.config.name}",
                soft_wrap=True,
            )
            announced = True
        time.sleep(POLL_INTERVAL_S)


def _train(
    planned: PlannedRun, lock: RunLock, endpoints: Endpoints, home: Path, console: Console
) -> EndedRun:
    with lock.held():
        try:
            result, was_trained = train_run(planned, lock, endpoints, home, console)
        except BapoError as error:
            return EndedRun(planned, error=error)
    return EndedRun(planned, result, was_trained)


def train_run(
    planned: PlannedRun, lock: RunLock, endpoints: Endpoints, home: Path, console: Console
) -> tuple[RunResult, bool]:
    """Trains a run, or continues it, or reads its results when it is finished.

    lock: of the run, acquired; it is released when the run has ended.

    Returns its result, and whether it was trained. Raises `BapoError` when it fails, and for a run
    of this name with another configuration, such as another commit of a data set of the hub.
    """
    from services.report.comparison import RunResult  # imports matplotlib

    config = planned.config
    if planned.fork is None:
        config = pin_revisions(pin_reward(config))
    config = pin_model(config, home, open_store=open_local_object_store)
    run = LocalRun(config, endpoints, home, REPORTS / config.name, console)
    state = {state.name: state for state in run.client.runs()}.get(config.name)
    if state is not None and state.config != config:
        before, now = (
            {
                **data_addresses(each),
                "model.path": each.model.path,
                "task.reward": each.task.reward,
            }
            for each in (state.config, config)
        )
        moved = [
            f"; {key} was {before[key]}, and is {address} now"
            for key, address in now.items()
            if key in before and before[key] != address
        ]
        raise BapoError(
            f"run {config.name!r} was started with another configuration; choose another name "
            f"(name=...){''.join(moved)}"
        )
    if state is not None and state.status == "finished":
        console.print(f"{config.name}: finished already")
        return RunResult.read(run.client, planned.label), False
    model = ensure_model(config, home, open_store=open_local_object_store)
    if state is None and planned.fork is not None:
        parent = BufferClient(endpoints.buffer_url, endpoints.token, run=planned.fork_of)
        parent.fork_run(planned.fork)
    elif state is None:
        create_run(run, model)
    execute(run, model, lock)
    return RunResult.read(run.client, planned.label), True


# -- several runs at a time


def share_cores(jobs: int) -> None:
    """Divides the cores of this machine among runs that are trained at a time.

    With more threads than cores, the threads wait for each other. Sets `OMP_NUM_THREADS` for this
    process and what it starts, unless a person has.
    """
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))


@contextmanager
def _same_command_beside(jobs: int, home: Path, console: Console) -> Iterator[list[ChildProcess]]:
    """Runs this process's command `jobs` - 1 more times for as long as the context lasts.

    The commands share their runs. What the others print is in `logs/job-2.log` of the home, and so
    on.
    """
    with ExitStack() as started:
        others: list[ChildProcess] = []
        for number in range(2, jobs + 1):
            log = home / "logs" / f"job-{number}.log"
            arguments = [*sys.argv[1:], "--jobs", "1"]
            other = ChildProcess(python_command("services.cli", *arguments), log=log)
            started.callback(other.stop, STOPPED_WITHIN_S)
            console.print(f"job {number}      {log}", soft_wrap=True)
            others.append(other)
        yield others


def _wait_for(others: Sequence[ChildProcess], console: Console) -> None:
    """Returns when the other commands have ended; says why one has failed."""
    for other in others:
        code = other.wait()
        if code:
            console.print(
                f"note: the command beside this one {describe_exit(code)}: {other.last_error()}",
                soft_wrap=True,
                markup=False,
            )
