"""The suites of `bapo eval` find their data and measure every set."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from bapo_core.errors import BapoError
from services.buffer.api.wire import Evaluation
from services.cli.evaluate import SampledResponse
from services.cli.main import bapo
from services.cli.suites import suite_config
from services.datasets import load_evaluation_sets
from services.model.resolve import TINY_MODEL

FILES = Path(__file__).parents[1] / "datasets/maths"
"""The forms of the public files, with problems of our own."""


def maths(*data: str, overrides: tuple[str, ...] = (), file: str | None = None) -> Any:
    return suite_config("maths", file, overrides, data)


def test_the_maths_suite_finds_the_public_files_by_their_names() -> None:
    suite = maths(str(FILES))
    assert suite.left_out == ("aime25",)
    sets = suite.config.evaluation_sets
    assert {name: Path(one.path or "").name for name, one in sets.items()} == {
        "aime24": "aime.json",
        "amc": "amc.json",
        "math500": "math.json",
        "minerva": "minerva.json",
        "olympiad": "olympiad_bench.json",
    }
    assert {(one.samples, one.temperature) for one in sets.values()} == {(32, 0.6)}
    loaded = load_evaluation_sets(suite.config)
    assert {name: len(dataset.prompts) for name, dataset in loaded.items()} == {
        "aime24": 2,
        "amc": 2,
        "math500": 4,
        "minerva": 3,
        "olympiad": 6,
    }


def test_a_limit_of_the_command_line_limits_the_sets_of_a_suite() -> None:
    loaded = load_evaluation_sets(maths(str(FILES), overrides=("task.test_prompts=2",)).config)
    assert {len(dataset.prompts) for dataset in loaded.values()} == {2}


@pytest.mark.maths
def test_the_public_files_are_loaded_whole() -> None:
    directory = os.environ.get("BAPO_MATHS_DATA")
    if directory is None:
        pytest.skip("needs the public files: set BAPO_MATHS_DATA to their directory")
    loaded = load_evaluation_sets(maths(directory).config)
    assert {name: len(dataset.prompts) for name, dataset in loaded.items()} == {
        "aime24": 30,
        "amc": 83,
        "math500": 500,
        "minerva": 272,
        "olympiad": 675,
    }


def test_the_address_of_a_set_may_be_given_alone_and_keys_may_be_overridden() -> None:
    suite = maths(
        "aime25=hf://organisation/aime25:test",
        overrides=("evaluation.samples=4", "evaluation.sets.aime25.columns={problem: question}"),
    )
    (one,) = suite.config.evaluation_sets.values()
    assert (one.name, one.path, one.samples) == ("aime25", "hf://organisation/aime25:test", 4)
    assert one.columns == {"problem": "question"}


def test_a_suite_replaces_the_sets_of_a_file_and_keeps_the_options_of_its_own_task(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    values: dict[str, Any] = {
        "task": {"name": "math", "options": {"instruction": "Box it."}, "train_path": "t.json"},
        "evaluation": {"sets": {"own": {"path": "x.json"}}, "primary": "own"},
    }
    file.write_text(yaml.safe_dump(values))
    config = maths(str(FILES), file=str(file)).config
    assert "own" not in config.evaluation_sets
    assert config.evaluation_sets["amc"].options == {"instruction": "Box it."}
    countdown = suite_config("countdown", str(file), [], []).config
    assert {name: dict(one.options) for name, one in countdown.evaluation_sets.items()} == {
        "cd-34": {"numbers": [3, 4]},
        "cd-4": {"numbers": [4]},
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((), "suite maths needs data: give --data DIRECTORY with files such as aime24.json"),
        (("nowhere",), "--data nowhere: is no directory and no SET=ADDRESS; the sets .* aime24"),
        (("gsm8k=x.json",), "--data gsm8k=x.json: is no directory and no SET=ADDRESS"),
    ],
)
def test_invalid_data_of_a_suite_are_refused(data: tuple[str, ...], message: str) -> None:
    with pytest.raises(BapoError, match=message):
        maths(*data)


@pytest.mark.parametrize(
    ("suite", "override", "message"),
    [
        (
            "maths",
            "evaluation.sets.math501.prompts=3",
            r"evaluation.sets.math501: suite maths has no such set; did you mean math500\? its "
            "sets are aime24, aime25, amc, math500, minerva, olympiad; give a set of your own a",
        ),
        (
            "maths",
            "evaluation.sets.zzz.samples=3",
            "suite maths has no such set; its sets are aime",
        ),
        ("maths", "evaluation.sets.aime25.prompts=3", "no data .*; add --data aime25=ADDRESS"),
        (
            "countdown",
            "evaluation.sets.cd-35.prompts=3",
            r"did you mean cd-34\? its sets are cd-34",
        ),
    ],
)
def test_a_key_of_a_set_that_is_not_measured_is_refused(
    suite: str, override: str, message: str
) -> None:
    data = [str(FILES)] if suite == "maths" else []
    with pytest.raises(BapoError, match=message):
        suite_config(suite, None, [override], data)


def test_an_override_may_add_a_set_of_its_own() -> None:
    added = maths(str(FILES), overrides=("evaluation.sets.own.path=own.json",)).config
    assert added.evaluation_sets["own"].path == "own.json"
    generated = ["evaluation.sets.cd-5.options={numbers: [5]}", "evaluation.sets.cd-4.prompts=3"]
    sets = suite_config("countdown", None, generated, []).config.evaluation_sets
    assert (sets["cd-5"].options["numbers"], sets["cd-4"].prompts) == ([5], 3)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "answers.jsonl cannot be read: No such file"),
        ("{}\n", [], "answers.jsonl: line 1 is no response of an evaluation"),
        ("", [], "answers.jsonl has no such response"),
        ("", ["--first", "1"], "--first"),
    ],
)
def test_a_file_without_responses_is_explained(
    content: str | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("answers.jsonl").write_text(content)
    result = CliRunner().invoke(bapo, ["responses", "answers.jsonl", *arguments])
    assert message in result.output + str(result.exception)


def test_a_model_is_measured_on_every_set_of_a_suite(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        *("eval", str(small_model), "task={options: {template: short}, test_prompts: 3}"),
        *("rollout.max_response_tokens=8", "rollout.max_prompt_tokens=24"),
        *("evaluation.samples=4", "--suite", "countdown"),
    ]
    result = CliRunner().invoke(bapo, [*arguments, "--json"], catch_exceptions=False)
    first, second = map(Evaluation.model_validate, json.loads(result.stdout))
    assert (first.evaluation_set, second.evaluation_set) == ("cd-34", "cd-4")
    assert sum(first.bins) == first.prompts == 3
    assert {(score.metric, score.k) for score in second.scores} == {
        ("mean", 4),
        *[("pass", 2), ("pass", 4)],
        *[("maj", 2), ("maj", 4)],
    }
    (written,) = tmp_path.glob("runs/eval-*.jsonl")
    assert f"responses: runs/{written.name}" in result.stderr
    kept = list(map(SampledResponse.model_validate_json, written.read_text().splitlines()))
    assert [(one.evaluation_set, one.index) for one in kept] == [
        (name, index) for name in ("cd-34", "cd-4") for _ in range(3) for index in range(4)
    ]
    assert sum(one.correct for one in kept[:12]) == sum(k * n for k, n in enumerate(first.bins))
    assert sum(one.tokens for one in kept[12:]) == second.tokens
    assert all((one.status == "ok") == one.correct for one in kept)
    listing = ["responses", str(written.relative_to(tmp_path)), "--set", "cd-4", "--wrong"]
    listed = CliRunner().invoke(bapo, [*listing, "--json"], catch_exceptions=False)
    wrong = [one for one in kept if one.evaluation_set == "cd-4" and not one.correct]
    assert json.loads(listed.stdout) == [one.model_dump(mode="json") for one in wrong]
    page = CliRunner().invoke(bapo, [*listing, "--limit", "1"], catch_exceptions=False).stdout
    assert page.startswith(f"{wrong[0].prompt_uid} (evaluation set cd-4)\n")
    assert f"response {wrong[0].index + 1}: reward 0, wrong" in page
    table = CliRunner().invoke(
        bapo,
        [*arguments, "--responses", "mine/written.jsonl"],
        catch_exceptions=False,
        env={"COLUMNS": "160"},
    )
    assert "mean@n" in table.stdout
    assert "average" in table.stdout
    assert len((tmp_path / "mine/written.jsonl").read_text().splitlines()) == len(kept)


@pytest.mark.parametrize("others", [[], ["task.train_path=not-here.jsonl"]])
def test_a_test_set_is_measured_without_training_data(
    tmp_path: Path, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "own.jsonl"
    data.write_text('{"numbers": [1, 2], "sum": 3}\n{"numbers": [2, 3], "sum": 5}\n')
    result = CliRunner().invoke(
        bapo,
        [
            *("eval", str(TINY_MODEL), f"task.test_path={data}", *others),
            "task.columns={nums: numbers, target: sum}",
            "task.options={template: short}",
            "rollout.max_response_tokens=4",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    (evaluation,) = json.loads(result.stdout)
    assert evaluation["prompts"] == 2
