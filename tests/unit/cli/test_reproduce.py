"""`bapo reproduce`: what it lists, writes and refuses, without training anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from click.testing import CliRunner, Result

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from services.cli import service, shared_runs
from services.cli.commands.reproduce import reproduce
from services.cli.shared_runs import EndedRun
from services.cli.variants import PlannedRun
from services.report.comparison import RunResult
from services.reproduction.declarations import find_items
from services.reproduction.plans import plan_runs
from services.reproduction.records import read_records
from tests.unit.report.test_comparison import result


def call(*arguments: str) -> Result:
    return CliRunner().invoke(reproduce, arguments, catch_exceptions=True)


def failed(*arguments: str) -> str:
    done = call(*arguments)
    assert done.exit_code != 0
    return str(done.exception) if isinstance(done.exception, BapoError) else done.output


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_list_explains_its_states_and_each_experiment() -> None:
    text = call("--list").output
    assert re.search(r" [1-9]\d* not run +runs are missing", text)
    assert "fig9: Figure 9 of 2602.20722: rollouts of DAPO\n  claim  DAPO generates more" in text
    assert "needs  DeepSeek-R1-Distill-Qwen-1.5B" in text
    assert "state  not run (0 of 8 runs) at small size" in text
    # What cannot be stated at small size says why.
    assert "says nothing about eight GPUs" in text
    one = json.loads(call("--list", "--json", "fig9").output)
    assert [each["name"] for each in one] == ["fig9"]


def test_wrong_arguments_are_refused_with_the_remedy() -> None:
    assert "name an experiment, or `all`" in failed()
    assert "did you mean fig9?" in failed("fig99")
    assert "has no experiment at small size: Wall time" in failed("table2")
    assert "has no experiment at paper size" in failed("r1", "--size", "paper")
    assert "are not whole numbers" in failed("fig9", "--seeds", "1,two")
    assert "has a seed twice" in failed("fig9", "--seeds", "1,1")
    assert "give it or --seeds, not both" in failed("fig9", "--seeds", "5", "--repeat")
    assert "leave --seeds and --repeat out" in failed("--list", "--seeds", "5")
    assert "leave --seeds and --repeat out" in failed("--list", "--repeat")
    assert "'small', 'paper'" in failed("fig9", "--size", "large")


def test_results_without_a_declaration_are_reported(tmp_path: Path) -> None:
    stale = tmp_path / "benchmarks/results/reproduction/reproduce-sorting-s1-00000000.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    assert f"belong to no declared run, such as {stale.name}" in call("--list").stderr


def test_the_papers_size_is_written_as_configurations_and_pipeline_runs(tmp_path: Path) -> None:
    done = call("r6", "--size", "paper", "--seeds", "1")
    assert done.exit_code == 0, done.output
    directory = tmp_path / "runs/reproduce-r6-paper"
    script = (directory / "submit.sh").read_text()
    declaration = find_items(["r6"])["r6"]
    for run in plan_runs(declaration.with_seeds([1]), "paper"):
        path = directory / f"{run.name}.yaml"
        assert load_config(path, []) == run.config()
        assert yaml.safe_load(path.read_text())["name"] == run.name
        assert f'bapo pipeline submit {run.name}.yaml gpus_per_worker=8 "$@"' in script
    assert len(list(directory.glob("*.yaml"))) == 3


def test_results_of_finished_runs_at_the_papers_size_are_read_from_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declaration = find_items(["r9"])["r9"]
    runs = plan_runs(declaration.with_seeds([1, 2]), "paper")
    labels = {run.name: run.label for run in runs}
    states = [Mock(status="finished" if index else "running") for index in range(len(runs))]
    for state, run in zip(states, runs, strict=True):
        state.name = run.name

    def read(client: Mock, label: str) -> RunResult:
        assert label == labels[client.run]
        return result(label, 1, [0.1, 0.2, 0.3], 10)

    monkeypatch.setattr(service, "connect_to_named", lambda run: Mock(run=run, runs=lambda: states))
    monkeypatch.setattr(RunResult, "read", read)
    done = call("r9", "--size", "paper", "--seeds", "1,2", "--results", "results")
    assert done.exit_code == 0, done.output
    assert "3 of 4 runs have results" in done.output
    script = (tmp_path / "runs/reproduce-r9-paper/submit.sh").read_text()
    assert [run.name for run in runs if run.name in script] == [runs[0].name]
    assert list(read_records(runs, tmp_path / "results")) == [run.name for run in runs[1:]]
    states[0].status = "finished"
    done = call("r9", "--size", "paper", "--seeds", "1,2", "--results", "results")
    assert "r9: not decided (4 runs)" in done.output


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces training; returns the names of the runs that were asked for."""
    names: list[str] = []

    def train_runs(runs: list[PlannedRun], **_: object) -> Iterator[EndedRun]:
        for planned in runs:
            names.append(planned.config.name)
            if len(names) == 2:
                yield EndedRun(planned, error=BapoError("disk full"))
                continue
            higher = 0.2 if planned.label == "bapo" else 0.0
            accuracies = [0.1, 0.3 + higher, 0.3 + higher + 0.001 * planned.config.seed]
            found = result(planned.label, planned.config.seed, accuracies, 10)
            yield EndedRun(planned, found, was_trained=True)

    monkeypatch.setattr(shared_runs, "train_runs", Mock(side_effect=train_runs))
    return names


def test_a_run_that_fails_keeps_no_other_from_being_trained_and_is_trained_next_time(
    trained: list[str], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    arguments = ("fig5", "--seeds", "1,2", "--results", str(results))
    runs = [run.name for run in plan_runs(find_items(["fig5"])["fig5"].with_seeds([1, 2]), "small")]
    assert f"because they failed: {runs[1]}" in failed(*arguments)
    assert trained == runs
    assert [path.stem for path in sorted(results.iterdir())] == sorted({*runs} - {runs[1]})
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert "3 of 4 runs have results" in done.output
    assert trained[4:] == [runs[1]]
    assert "fig5: holds (4 runs)" in done.output
    assert "bapo - grpo = +0.200" in done.output
    assert (tmp_path / "runs/reproduce-fig5-seeds-1-2/fig5.html").is_file()
    # With all results, nothing is trained, and the page is drawn again.
    again = call(*arguments)
    assert "4 of 4 runs have results" in again.output
    assert "fig5: holds (4 runs)" in again.output
    assert len(trained) == 5


def test_a_repetition_has_other_seeds_and_a_page_of_its_own(
    trained: list[str], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    runs = [run.name for run in plan_runs(find_items(["fig5"])["fig5"].repeated(), "small")]
    failed("fig5", "--repeat", "--results", str(results))
    done = call("fig5", "--repeat", "--results", str(results))
    assert "fig5: holds (8 runs)" in done.output
    assert {*trained} == {*runs}
    assert (tmp_path / "runs/reproduce-fig5-repeat/fig5.html").is_file()
    assert not (tmp_path / "runs/reproduce-fig5").exists()
    (listed,) = json.loads(call("--list", "--json", "fig5", "--results", str(results)).output)
    assert (listed["state"], listed["done"]) == ("not run", 0)
    assert (listed["repeat"]["state"], listed["repeat"]["done"]) == ("holds", 8)
    assert "belong to no declared run" not in call("--list", "--results", str(results)).stderr


def test_two_failures_in_a_row_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_runs(runs: list[PlannedRun], **_: object) -> Iterator[EndedRun]:
        for planned in runs:
            yield EndedRun(planned, error=BapoError(f"no disk for {planned.config.name}"))

    monkeypatch.setattr(shared_runs, "train_runs", Mock(side_effect=train_runs))
    message = failed("fig5", "--results", "results")
    second = plan_runs(find_items(["fig5"])["fig5"], "small")[1]
    assert "2 runs in a row failed" in message
    assert f"no disk for {second.name}" in message
