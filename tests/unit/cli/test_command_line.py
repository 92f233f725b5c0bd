"""The command line: what it imports, how it reads arguments, and how it shows errors."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import click
import pytest

from bapo_core.config import RunConfig
from bapo_core.config.rollouts import RolloutConfig, VllmConfig
from services import VERSION
from services.cli.local_run import count_threads, engine_threads
from services.cli.main import SECTIONS, bapo, main
from services.cli.options import ConfigArguments, split_config_arguments
from services.cli.shared_runs import share_cores
from services.cli.tables import fitting_columns

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "examples/countdown.yaml")
PLACES = {name: place for section in SECTIONS.values() for name, place in section.items()}
HEAVY = ("torch", "transformers", "matplotlib", "kfp", "mlflow")


def imported(code: str, *modules: str) -> set[str]:
    """Returns which of these modules a fresh interpreter has imported after `code`."""
    program = f"import sys\n{code}\nprint([name for name in {modules!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(eval(done.stdout.splitlines()[-1]))


def every_command(group: click.Group, path: str = "bapo") -> dict[str, click.Command]:
    commands = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        commands[f"{path} {name}"] = command
        if isinstance(command, click.Group):
            commands |= every_command(command, f"{path} {name}")
    return commands


def test_help_imports_no_command_and_no_library_but_click() -> None:
    code = "from services.cli.main import main; main(['--help'])"
    heavy = (*HEAVY, "pydantic", "rich", "yaml", "httpx", "numpy")
    assert (
        imported(code, *heavy, *(place.target.split(":")[0] for place in PLACES.values())) == set()
    )


def test_checking_a_configuration_imports_no_service() -> None:
    code = f"from services.cli.main import main; main(['config', 'check', {CONFIG!r}])"
    assert imported(code, *HEAVY, "rich", "httpx", "numpy", "services.stack.stack") == set()


def test_importing_a_command_imports_nothing_that_takes_seconds() -> None:
    modules = sorted({place.target.split(":")[0] for place in PLACES.values()})
    assert imported(f"import {', '.join(modules)}", *HEAVY) == set()


def test_help_takes_little_processor_time() -> None:
    """The processor time of the command, and not the time on the clock of a busy machine."""
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "services.cli", "--help"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        after = os.times()
        seconds.append(after.children_user - before.children_user)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", PLACES)
def test_the_list_of_commands_agrees_with_the_commands(name: str) -> None:
    module, _, function = PLACES[name].target.partition(":")
    command = getattr(importlib.import_module(module), function)
    assert command.name == name
    assert cleandoc(command.help).splitlines()[0] == PLACES[name].summary


def test_every_command_and_parameter_is_explained_in_sentences() -> None:
    for path, command in every_command(bapo).items():
        assert cleandoc(command.help or "").split("\n\n")[0].endswith("."), path
        for parameter in command.params:
            assert (parameter.help or "").endswith("."), f"{path}: {parameter.name}"


@pytest.mark.parametrize("options", [["-h"], ["--help"]])
def test_help_of_a_command(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", *options])
    shown = capsys.readouterr().out
    assert "bapo run examples/countdown.yaml --resume" in shown
    assert "8700" in shown


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"bapo {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ConfigArguments(None, ())),
        (["a.yaml"], ConfigArguments("a.yaml", ())),
        (["a.yaml", "seed=1", "steps=2"], ConfigArguments("a.yaml", ("seed=1", "steps=2"))),
        (["seed=1", "steps=2"], ConfigArguments(None, ("seed=1", "steps=2"))),
    ],
)
def test_a_file_comes_first_and_may_be_missing(
    arguments: list[str], expected: ConfigArguments
) -> None:
    assert split_config_arguments(arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [CONFIG, "seed=7", "--algorithms", "bapo", "steps=9", "--seeds", "1", "lora.rank=4"],
        ["--seeds", "1", CONFIG, "seed=7", "steps=9", "--algorithms", "bapo", "lora.rank=4"],
    ],
)
def test_overrides_may_stand_anywhere(arguments: list[str]) -> None:
    command = every_command(bapo)["bapo compare"]
    parsed = command.make_context("compare", list(arguments)).params
    assert parsed["config"] == ConfigArguments(CONFIG, ("seed=7", "steps=9", "lora.rank=4"))
    assert (parsed["algorithms"], parsed["seeds"]) == ("bapo", "1")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Usage: bapo"),
        (["rnu"], 2, "Did you mean 'run'?"),
        (["config"], 2, "Usage: bapo config"),
        (["run", "--prot", "1"], 2, "--port"),
        (["run"], 2, "name a configuration, such as examples/countdown.yaml"),
        (["run", "--resume", "--new"], 2, "--resume continues a run, --new starts one"),
        (["checkpoints", "r", "--step", "1", "--best"], 2, "--step and --best exclude each other"),
        (["compare", "--seeds", "1,x"], 2, "'1,x' are not whole numbers"),
        (["runs", "extra"], 2, "extra"),
        (["config", "check", "missing.yaml"], 1, "error: missing.yaml: cannot be read"),
        (
            ["config", "check", CONFIG, "more.yaml"],
            1,
            "error: override 'more.yaml': write key=value",
        ),
        (["config", "check", "sync.evry=3"], 1, "did you mean sync.every?"),
        (
            ["config", "check", "task.options.template=poem"],
            1,
            "error: task countdown: template is 'poem'; choose short",
        ),
        (
            ["config", "check", "evaluation.sets.four.options.numbers=[40]"],
            1,
            "error: evaluation.sets.four: task countdown: numbers is [40]",
        ),
    ],
)
def test_errors_are_told_from_wrong_usage(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code
    shown = capsys.readouterr().err
    assert message in shown
    assert code == 2 or len(shown.splitlines()) == 1


def test_an_interruption_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("services.cli.options.ConfigArguments.load", interrupt)
    with pytest.raises(SystemExit) as caught:
        main(["config", "check"])
    assert caught.value.code == 130
    assert capsys.readouterr().err.split() == ["error:", "interrupted"]


def test_data_and_model_are_checked_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAPO_HOME", str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"nums": [1, 2, 3], "goal": 6}\n')
    test = tmp_path / "test.jsonl"
    test.write_text('{"nums": [2, 3, 4], "goal": 9}\n')
    data = [f"task.train_path={rows}", f"task.test_path={test}", "rollout.prompts_per_step=1"]
    check = ["config", "check", CONFIG, *data, "optimizer.minibatch_prompts=1"]
    main(check)
    assert "data and model are read when a run starts, or with --data" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*check, "--data"])
    assert "row 1: no column target (there are" in capsys.readouterr().err
    main([*check, "task.columns.target=goal", "--data"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in shown[-3:-1]] == ["1 prompts"] * 2
    assert shown[-1].endswith("its model and its data are valid")


def test_the_schema_knows_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "schema"])
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(RunConfig.model_fields)


def test_a_narrow_table_keeps_the_most_important_columns() -> None:
    columns, rows = ["step", "reward", "memory"], [["1", "0.5", "100000"]]
    order = ["step", "memory"]
    assert fitting_columns(columns, rows, 20, first=order) == [0, 1, 2]
    assert fitting_columns(columns, rows, 19, first=order) == [0, 2]
    assert fitting_columns(columns, rows, 11, first=order) == [0]
    assert fitting_columns(columns, [], 12, first=order) == [0, 2]


def test_replicas_of_vllm_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rollout = RolloutConfig(engine=VllmConfig(), replicas=3)
    assert engine_threads(rollout) == {"OMP_NUM_THREADS": "2"}
    assert engine_threads(rollout.model_copy(update={"replicas": 16})) == {"OMP_NUM_THREADS": "1"}
    assert engine_threads(RolloutConfig(replicas=3)) == {}


def test_a_persons_number_of_threads_is_that_of_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for value, threads in (("3", 3), ("", 8), ("many", 8), ("0", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert count_threads() == threads, value
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert engine_threads(RolloutConfig(engine=VllmConfig(), replicas=2)) == {
        "OMP_NUM_THREADS": "2"
    }


def test_runs_that_are_trained_at_a_time_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    for jobs in (1, 3):
        share_cores(jobs)
        assert os.environ["OMP_NUM_THREADS"] == "5"
    for jobs, threads in ((1, None), (3, "2"), (16, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        share_cores(jobs)
        assert os.environ.get("OMP_NUM_THREADS") == threads
