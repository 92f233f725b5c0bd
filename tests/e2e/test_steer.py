"""Runs that are trained longer, changed and taken over, compared with undisturbed runs.

The configuration is the one of `test_run.py`, whose schedules do not depend on the number of steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.stack.stack import Endpoints
from tests.e2e.test_run import (
    STEPS,
    TIMEOUT_S,
    Bapo,
    _child,
    _children,
    _committed,
    _outcome,
    _wait_until,
)

FIRST_STEPS = 4
"""Steps after which runs are changed: in the middle of a sync window, and of a replay window."""
CHANGE = (f"steps={STEPS}", "optimizer.learning_rate=2e-4", "optimizer.weight_decay=0.5")


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    stack: Endpoints,
    small_model: Path,
) -> Bapo:
    return Bapo(tmp_path_factory.mktemp("steered"), environment, stack, small_model)


@pytest.fixture(scope="module")
def planned(bapo: Bapo) -> dict[str, Any]:
    """Trains a run that has all of its steps from the start, and returns its outcome."""
    bapo.run("planned")
    return _outcome(bapo, "planned")


@pytest.fixture(scope="module")
def changed(bapo: Bapo) -> str:
    """Trains a run whose number of steps and whose rates are changed when it is finished."""
    bapo.run("changed", f"steps={FIRST_STEPS}")
    said = bapo.run("changed", "--resume", *CHANGE)
    assert (
        f"from step {FIRST_STEPS + 1} on: optimizer.learning_rate 0.0001 -> 0.0002, "
        f"optimizer.weight_decay 0.1 -> 0.5, steps {FIRST_STEPS} -> {STEPS}"
    ) in said
    return "changed"


def without(outcome: dict[str, Any], version: int) -> dict[str, Any]:
    """Returns an outcome without the evaluation of a version."""
    kept = [each for each in outcome["evaluations"] if each.version != version]
    return {**outcome, "evaluations": kept}


def test_a_finished_run_that_gets_more_steps_is_the_run_that_had_them_from_the_start(
    bapo: Bapo, planned: dict[str, Any]
) -> None:
    bapo.run("longer", f"steps={FIRST_STEPS}")
    refused = bapo.start("longer", "--resume", f"steps={FIRST_STEPS}")
    _, errors = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 1
    assert errors.startswith(
        "error: run 'longer' is finished; `bapo report longer` shows it, and --resume with "
        f"steps=N, above {FIRST_STEPS}, trains it longer"
    )
    bapo.run("longer", "--resume", f"steps={STEPS}")
    state = bapo.client("longer").run_state()
    assert (state.status, state.current_step, state.steps) == ("finished", STEPS, STEPS)
    # The weights that were the final ones were evaluated at that time.
    outcome = _outcome(bapo, "longer")
    assert FIRST_STEPS + 1 in [each.version for each in outcome["evaluations"]]
    assert without(outcome, FIRST_STEPS + 1) == planned


def test_a_changed_run_is_another_run_from_the_change_on_alone(
    bapo: Bapo, planned: dict[str, Any], changed: str
) -> None:
    outcome = _outcome(bapo, changed)
    assert outcome["digests"][:FIRST_STEPS] == planned["digests"][:FIRST_STEPS]
    assert outcome["weights"] != planned["weights"]
    first_steps = [change.first_step for change in bapo.client(changed).run_state().changes]
    assert first_steps == [FIRST_STEPS + 1]


def test_the_steps_before_and_after_a_change_are_audited_with_their_own_configuration(
    bapo: Bapo, changed: str
) -> None:
    assert f"digest chain of {STEPS} steps is whole" in bapo.inspect("audit", changed, "--chain")
    shown = bapo.inspect("audit", changed, "--steps", f"1:{STEPS}").splitlines()
    assert shown[-STEPS:] == [f"step {step}: the same weights" for step in range(1, STEPS + 1)]


def test_a_changed_run_that_goes_back_before_the_change_repeats_it(
    bapo: Bapo, changed: str
) -> None:
    bapo.run("again", f"steps={FIRST_STEPS}", "checkpoint.keep=9")
    process = bapo.start("again", "--resume", *CHANGE)
    client = bapo.client("again")
    _wait_until(lambda: _committed(client) > FIRST_STEPS + 1, process)
    os.kill(_child(process.pid, "trainer"), signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    kept = [view.step for view in client.checkpoints()]
    client.attempt = client.run_state().attempt
    client.rewind(min(kept))
    assert client.run_state().current_step < FIRST_STEPS
    bapo.run("again", "--resume")
    # The weights after the first steps were evaluated as the final ones, which they are not now.
    expected, actual = (_outcome(bapo, name) for name in (changed, "again"))
    assert actual == without(expected, FIRST_STEPS + 1)
    assert len(client.run_state().changes) == 1


def test_keys_that_make_another_run_are_refused_with_the_remedy(bapo: Bapo, changed: str) -> None:
    before = bapo.client(changed).run_state()
    for key, value in (("seed", "6"), ("model.path", "/another"), ("sync.every", "2")):
        process = bapo.start(changed, "--resume", f"{key}={value}")
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        assert errors.startswith(f"error: run 'changed' cannot change {key}={value}: ")
        assert "it may change steps, optimizer.learning_rate, " in errors
        remedy = f"fork it: `bapo fork changed --at STEP {key}={value}`"
        if key == "model.path":  # A fork shares a past with the model of the run.
            remedy = "start a new run with `bapo run`, of the trained model by `bapo checkpoints"
        assert remedy in errors
    assert bapo.client(changed).run_state() == before


def test_a_command_takes_a_run_over_only_if_it_is_told_to(
    bapo: Bapo, planned: dict[str, Any]
) -> None:
    first = bapo.start("taken")
    client = bapo.client("taken")
    _wait_until(lambda: _committed(client) >= 1, first)
    client.pause()  # so that it does not end meanwhile
    second = bapo.start("taken", "--resume")
    _, errors = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 1
    assert errors.startswith("error: run 'taken' is being trained here since ")
    assert f"by process {first.pid}, at step " in errors
    assert errors.endswith(
        "; --take-over stops that command, and continues the run from its last checkpoint\n"
    )
    assert first.poll() is None
    assert client.run_state().attempt == 1
    third = bapo.start("taken", "--resume", "--take-over")
    _, errors = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 1
    lines = errors.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: another command took over run 'taken' at ")
    assert f"(process {third.pid})" in lines[0]
    assert _children(first.pid) == []
    output, errors = third.communicate(timeout=TIMEOUT_S)
    assert third.returncode == 0, output + errors
    assert _outcome(bapo, "taken") == planned
    logs = Path(bapo.environment["BAPO_HOME"]) / "logs" / "taken"
    assert "was stopped by" in (logs / "collector.previous.log").read_text()
    assert "was stopped by" not in (logs / "collector.log").read_text()


def start_in_terminal(bapo: Bapo, answer: str, name: str, *options: str) -> subprocess.Popen[str]:
    """Starts `bapo run` with a pseudo-terminal as its input, into which the answer is typed."""
    ours, terminal = os.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", "run", f"{name}.yaml", *options],
            cwd=bapo.directory,
            env=bapo.environment,
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(ours,),  # The terminal exists while a process holds it.
        )
    finally:
        os.close(ours)
        os.close(terminal)


def test_a_command_in_a_terminal_asks_before_it_takes_a_run_over(bapo: Bapo) -> None:
    first = bapo.start("asked")
    client = bapo.client("asked")
    _wait_until(lambda: _committed(client) >= 1, first)
    client.pause()  # so that it does not end meanwhile
    declined = start_in_terminal(bapo, "n", "asked", "--resume")
    output, errors = declined.communicate(timeout=TIMEOUT_S)
    assert declined.returncode == 1
    assert f"by process {first.pid}, at step " in output + errors
    assert "Stop that command, and continue the run here? [y/N]: " in output + errors
    assert errors.endswith("error: the run was left to the other command\n")
    assert first.poll() is None
    assert client.run_state().attempt == 1
    agreed = start_in_terminal(bapo, "y", "asked", "--resume")
    _, errors = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 1
    assert errors.startswith("error: another command took over run 'asked' at ")
    assert f"(process {agreed.pid})" in errors
    output, errors = agreed.communicate(timeout=TIMEOUT_S)
    assert agreed.returncode == 0, output + errors
    assert client.run_state().status == "finished"


def test_a_command_whose_run_begins_another_attempt_elsewhere_says_so(bapo: Bapo) -> None:
    process = bapo.start("superseded")
    client = bapo.client("superseded")
    _wait_until(lambda: _committed(client) >= 1, process)
    state = client.begin_attempt()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    lines = errors.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: another command took over run 'superseded' at ")
    assert client.run_state().attempt == state.attempt
    client.stop()
