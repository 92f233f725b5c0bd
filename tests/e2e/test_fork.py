"""Forks of a real run, and runs on its recorded rollouts, compared with the run bit for bit.

The configuration is the one of `test_run.py`, with a checkpoint after steps 2, 5, 8 and 9 and a
sync before steps 3, 6 and 9.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.stack.stack import Endpoints
from tests.e2e.test_run import (
    STEPS,
    TIMEOUT_S,
    Bapo,
    _child,
    _committed,
    _outcome,
    _wait_until,
)


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    stack: Endpoints,
    small_model: Path,
) -> Bapo:
    return Bapo(tmp_path_factory.mktemp("forked"), environment, stack, small_model)


def outcome(bapo: Bapo, name: str) -> dict[str, Any]:
    """Returns what a fork and its parent have in common, whose rows are the parent's or its own."""
    return {key: value for key, value in _outcome(bapo, name).items() if key != "prompts"}


@pytest.fixture(scope="module")
def parent(bapo: Bapo) -> str:
    bapo.run("forked", "checkpoint.keep=9")
    return "forked"


def test_a_fork_without_changes_is_its_parent_bit_for_bit_though_it_is_killed(
    bapo: Bapo, parent: str
) -> None:
    process = bapo.start_command("fork", parent, "--at", "5", "--name", "same")
    client = bapo.client("same")
    _wait_until(lambda: _committed(client) >= 7, process)
    os.kill(_child(process.pid, "trainer"), signal.SIGKILL)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert f"same is a fork of {parent} at step 5" in " ".join(output.split())
    assert "continue with `bapo run name=same --resume`" in " ".join(errors.split())
    bapo.run_command("run", "name=same", "--resume")
    assert outcome(bapo, "same") == outcome(bapo, parent)
    trained = [view.step for view in client.spans(1, STEPS) if view.name == "update"]
    assert min(trained) == 6, "no step of the past was trained again"


def test_a_fork_at_a_step_without_a_checkpoint_trains_the_recorded_batches_again(
    bapo: Bapo, parent: str
) -> None:
    said = bapo.run_command("fork", parent, "--at", "7", "--name", "between")
    assert "step 7 has no checkpoint: steps 6 to 7 are trained again first" in said
    assert outcome(bapo, "between") == outcome(bapo, parent)
    assert 7 in [view.step for view in bapo.client("between").checkpoints()]
    assert f"digest chain of {STEPS} steps is whole" in bapo.inspect("audit", "between", "--chain")


def test_a_fork_with_other_values_is_another_run_from_its_step_on(bapo: Bapo, parent: str) -> None:
    rules = ("replay.select=off", "optimizer.learning_rate=2e-4", "sync.every=1")
    said = bapo.run_command("fork", parent, "--at", "5", "--name", "other", *rules)
    assert "from step 6 on: name forked -> other, optimizer.learning_rate 0.0001 -> 0.0002" in said
    own, past = outcome(bapo, "other"), outcome(bapo, parent)
    assert own["digests"][:5] == past["digests"][:5]
    assert own["weights"] != past["weights"]
    sources = {member[0] for batch in own["compositions"][5:] for member in batch}
    assert "replayed" not in sources
    # The steps of the past are audited with the configuration that they had.
    shown = bapo.inspect("audit", "other", "--steps", f"6:{STEPS}").splitlines()
    assert shown[-1] == f"step {STEPS}: the same weights"
    listed = bapo.inspect("runs")
    assert f"{parent} at step 5" in " ".join(listed.split())


def test_a_run_on_recorded_rollouts_under_the_same_rules_is_the_run(
    bapo: Bapo, parent: str
) -> None:
    arguments = ("train", "--from-run", parent, "--steps", f"1:{STEPS}", "--name", "recorded")
    bapo.run_command(*arguments)
    assert outcome(bapo, "recorded") == outcome(bapo, parent)
    kinds = {view.name for view in bapo.client("recorded").spans(1, STEPS)}
    assert "update" in kinds


def test_another_loss_trains_on_the_recorded_batches_without_an_engine(
    bapo: Bapo, parent: str
) -> None:
    arguments = ("train", "--from-run", parent, "--steps", f"6:{STEPS}", "--name", "loss")
    bapo.run_command(*arguments, "--no-engine", "optimizer.learning_rate=2e-4")
    own, past = outcome(bapo, "loss"), outcome(bapo, parent)
    assert own["compositions"] == past["compositions"]
    assert [link[1] for link in own["digests"]] == [link[1] for link in past["digests"]]
    assert own["weights"] != past["weights"]
    state = bapo.client("loss").run_state()
    assert state.status == "finished"
    assert STEPS + 1 not in [each.version for each in own["evaluations"]]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (("fork", "nothing", "--at", "1"), "there is no run 'nothing'; `bapo runs` lists them"),
        (("fork", "forked", "--at", "12"), "step 12 of run 'forked' is not committed"),
        (("fork", "forked", "--at", "5", "model.path=tiny"), "model.path=tiny cannot change"),
        (("fork", "forked", "--at", "5", "examples/x.yaml"), "examples/x.yaml: the new run has"),
        (("fork", "forked", "--at", "5", "name=mine"), "give it as --name"),
        (("train", "--from-run", "forked", "--steps", "9"), "write FIRST:LAST"),
        (
            ("train", "--from-run", "forked", "--steps", "1:4", "steps=6", "--no-engine"),
            "leave --no-engine or steps out",
        ),
        (("train", "--from-run", "forked", "--steps", "1:20"), "has rollouts of all its steps"),
    ],
)
def test_what_cannot_be_forked_is_refused_in_one_line(
    bapo: Bapo, parent: str, arguments: tuple[str, ...], refused: str
) -> None:
    assert parent == "forked"
    process = bapo.start_command(*arguments)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (1, 2)
    assert refused in " ".join(errors.split())


def test_a_fork_of_a_run_of_other_code_says_so(
    bapo: Bapo, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = bapo.inspect("fork", parent, "--at", "5", "--name", "code-1", "--no-train")
    assert "other code" not in quiet
    assert "train it with `bapo run name=code-1 --resume`" in " ".join(quiet.split())
    monkeypatch.setattr("services.cli.commands.fork.code_version", lambda: "0.9.0+0123")
    said = bapo.inspect("fork", parent, "--at", "5", "--name", "code-2", "--no-train")
    assert "note: step 5 was trained by other code" in " ".join(said.split())
