"""Data sets are read from files: their formats, their columns, and what is wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from bapo_core.tasks import Payload, get_task
from services.datasets import DataSources, digest_of_prompts, load_datasets, read_dataset

MATH = get_task("math")
ROWS: list[dict[str, Any]] = [
    {"question": "1+1?", "solution": "2", "level": 1},
    {"question": "1+2?", "solution": ["3", "3.0"], "level": 1},
    {"question": "1+3?", "solution": None, "level": 1},
    {"question": "1+1? ", "solution": ["2.0"], "level": 2},
]
COLUMNS = {"problem": "question", "answer": "solution"}


def write(path: Path, rows: list[Any]) -> str:
    match path.suffix:
        case ".jsonl":
            path.write_text("\n\n".join(map(json.dumps, rows)) + "\n \n")
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def as_lists(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with one type of solution, because a column of Parquet has one."""
    return [
        {
            **row,
            "solution": [row["solution"]] if isinstance(row["solution"], str) else row["solution"],
        }
        for row in rows
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_columns_are_mapped_and_further_ones_ignored(tmp_path: Path, suffix: str) -> None:
    address = write(tmp_path / f"data{suffix}", as_lists(ROWS))
    dataset = read_dataset(MATH, address, DataSources(), COLUMNS)
    assert [prompt.payload for prompt in dataset.prompts] == [
        {"problem": "1+1?", "answer": "2"},
        {"problem": "1+2?", "answer": ["3", "3.0"]},
    ], "the first of equal problems is kept"
    assert dataset.summary == (
        "2 prompts, 1 rows without an answer left out, "
        "1 rows with a problem of an earlier row left out (1 of them with another answer)"
    )
    assert dataset.name == f"math-{digest_of_prompts(dataset.prompts)[:12]}"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_task_may_take_all_columns_and_rename_any(tmp_path: Path, suffix: str) -> None:
    address = write(tmp_path / f"data{suffix}", as_lists(ROWS)[:2])
    columns = {"prompt": "question", "answer": "solution"}
    dataset = read_dataset(get_task("function"), address, DataSources(), columns)
    assert [prompt.payload for prompt in dataset.prompts] == [
        {"prompt": "1+1?", "columns": {"answer": ["2"], "level": 1}},
        {"prompt": "1+2?", "columns": {"answer": ["3", "3.0"], "level": 1}},
    ]
    with pytest.raises(
        BapoError, match=r"no column prompt \(there are question, solution, level\)"
    ):
        read_dataset(get_task("function"), address, DataSources(), {})


def test_the_limit_counts_rows_and_not_prompts(tmp_path: Path) -> None:
    address = write(tmp_path / "data.jsonl", ROWS)
    dataset = read_dataset(MATH, address, DataSources(), COLUMNS, 3)
    assert dataset.summary == (
        "2 prompts, 1 rows without an answer left out, read up to the limit of 3 rows"
    )
    assert read_dataset(MATH, address, DataSources(), COLUMNS, 5).limit is None


def test_the_name_is_that_of_the_content_whatever_the_format(tmp_path: Path) -> None:
    rows = as_lists(ROWS)
    addresses = [write(tmp_path / f"data{suffix}", rows) for suffix in (".json", ".parquet")]
    names = {read_dataset(MATH, path, DataSources(), COLUMNS).name for path in addresses}
    assert len(names) == 1


GOOD = '{"problem": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", b"problem,answer", "data.csv: the suffix is '.csv'; give a file"),
        ("data.parquet", b"PAR1", "data.parquet: not a Parquet file"),
        ("data.jsonl", b"{", "data.jsonl, row 1: not JSON"),
        ("data.jsonl", GOOD.encode() + b"\xff\xfe", "data.jsonl, row 2: not JSON"),
        ("data.jsonl", b"[1, 2]", r"row 1: is \[1, 2\]; make every row a JSON object"),
        ("data.jsonl", b'{"problem": 3, "answer": 3}', "row 1: problem is 3; make it the text"),
        ("data.jsonl", b'{"problem": "\\u0000", "answer": 3}', "row 1: .* holds a NUL character"),
        ("data.jsonl", b'{"problem": "\\ud800", "answer": 3}', "row 1: .* surrogates not allowed"),
        ("data.json", b"[", "data.json: not JSON"),
        ("data.json", b"{}", "data.json: is a JSON dict; write a list of objects"),
        ("data.json", b"[]", "data.json: has no row with an answer"),
        ("data.json", b'[{"problem": "?", "answer": ""}]', "has no row with an answer"),
        (
            "data.jsonl",
            (GOOD + '{"question": "1+2?", "answer": "3"}').encode(),
            r"row 2: no column problem \(there are question, answer\); name the columns of the",
        ),
    ],
)
def test_an_invalid_file_or_row_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BapoError, match=message) as caught:
        read_dataset(MATH, str(path), DataSources(), {})
    assert str(caught.value).startswith(str(path))


def test_a_parquet_file_without_the_columns_lists_those_that_it_has(tmp_path: Path) -> None:
    address = write(tmp_path / "data.parquet", as_lists(ROWS))
    with pytest.raises(
        BapoError, match=r"no column problem, answer \(there are question, solution"
    ):
        read_dataset(MATH, address, DataSources(), {})


def test_a_misspelt_column_is_told_the_one_that_is_like_it(tmp_path: Path) -> None:
    address = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(BapoError, match=r"no column questoin .*; did you mean question\? name the"):
        read_dataset(MATH, address, DataSources(), {"problem": "questoin", "answer": "solution"})


def test_a_column_that_the_task_does_not_have_is_refused(tmp_path: Path) -> None:
    address = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(BapoError, match="task math has no column question; its columns are"):
        read_dataset(MATH, address, DataSources(), {"question": "problem"})


def test_a_problem_that_the_verifier_would_refuse_is_refused(tmp_path: Path) -> None:
    address = write(tmp_path / "data.jsonl", [{"problem": "x" * 100_000, "answer": "1"}])
    with pytest.raises(BapoError, match="row 1: the problem is longer than 100000 bytes"):
        read_dataset(MATH, address, DataSources(), {})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("parse_row", "row 1: task math: parse_row raised KeyError: 'anser' (test_files.py:"),
        ("uid", "row 1: task math: uid raised KeyError: 'anser' (test_files.py:"),
    ],
)
def test_a_mistake_in_a_task_is_one_line_that_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    def mistaken(row: dict[str, Any]) -> Any:
        return row["anser"]

    address = write(tmp_path / "data.jsonl", [{"problem": "1+2", "answer": "3"}])
    monkeypatch.setattr(type(MATH), method, staticmethod(mistaken))
    with pytest.raises(BapoError, match=re.escape(message)):
        read_dataset(MATH, address, DataSources(), {})


def test_a_problem_that_uid_cannot_take_is_a_mistake_of_the_task_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `ValueError` refuses a row in `parse_row` alone."""

    def mistaken(payload: Payload) -> str:
        return f"choosy:{int(payload['problem'])}"

    rows = [{"problem": "1", "answer": "1"}, {"problem": "x", "answer": "1"}]
    address = write(tmp_path / "data.jsonl", rows)
    monkeypatch.setattr(type(MATH), "uid", staticmethod(mistaken))
    mistake = (
        r"data.jsonl, row 2: task math: uid raised ValueError: invalid literal .* \(test_files"
    )
    with pytest.raises(BapoError, match=mistake):
        read_dataset(MATH, address, DataSources(), {})


def test_a_mistake_in_the_columns_of_a_task_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(_: Any) -> Any:
        return ["problem", *{}["anser"]]

    address = write(tmp_path / "data.jsonl", [{"problem": "1", "answer": "1"}])
    monkeypatch.setattr(type(MATH), "columns", property(mistaken))
    with pytest.raises(
        BapoError, match=r"task math: columns raised KeyError: 'anser' \(test_files"
    ):
        read_dataset(MATH, address, DataSources(), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BapoError, match=r"none.jsonl: No such file or directory; give the path"):
        read_dataset(MATH, str(tmp_path / "none.jsonl"), DataSources(), {})


def math_config(**task: Any) -> RunConfig:
    return config_from(
        {
            "task": {"name": "math", **task},
            "rollout": {"prompts_per_step": 2},
            "optimizer": {"minibatch_prompts": 2},
        }
    )


def test_held_out_prompts_in_the_training_data_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "both.jsonl", ROWS)
    overlap = r"^2 training prompts are held-out prompts too \(the first: .*test_path$"
    with pytest.raises(BapoError, match=overlap):
        load_datasets(math_config(train_path=data, test_path=data, columns=COLUMNS))


def test_training_and_held_out_prompts_are_named_by_their_part(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", ROWS)
    test = write(tmp_path / "test.jsonl", [{"question": "2+2?", "solution": 4}])
    config = math_config(train_path=train, test_path=test, columns=COLUMNS)
    datasets = load_datasets(config)
    names = [dataset.name.rsplit("-", 1)[0] for dataset in datasets.all]
    assert names == ["math-train", "math-test"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"train_path": "x.jsonl"}, "task.test_path is not set; set both"),
        ({"test_path": "x.jsonl"}, "task.train_path is not set; set both"),
        ({}, "task math cannot generate prompts; set task.train_path and task.test_path"),
    ],
)
def test_training_and_held_out_data_need_each_other(task: dict[str, Any], message: str) -> None:
    with pytest.raises(BapoError, match=message):
        load_datasets(math_config(**task))


# ---- evaluation sets -----------------------------------------------------------------------------


def sets_config(tmp_path: Path, **sets: dict[str, Any]) -> RunConfig:
    train = write(tmp_path / "train.jsonl", ROWS)
    config = math_config(train_path=train, columns=COLUMNS)
    return config_from(config.model_dump() | {"evaluation": {"sets": sets}})


def test_each_set_is_read_with_its_own_columns_and_limit(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}+0?", "answer": n} for n in range(5)]
    plain = write(tmp_path / "plain.jsonl", rows)
    mapped = write(tmp_path / "mapped.json", [{"question": "2+2?", "solution": 4}])
    own = {"problem": "problem", "answer": "answer"}
    datasets = load_datasets(
        sets_config(
            tmp_path, plain={"path": plain, "columns": own, "prompts": 3}, mapped={"path": mapped}
        )
    )
    assert {name: len(test.prompts) for name, test in datasets.test.items()} == {
        "mapped": 1,
        "plain": 3,
    }
    assert datasets.test["plain"].name.rsplit("-", 1)[0] == "math-plain"
    assert datasets.test_names["mapped"] == datasets.test["mapped"].name


def test_an_error_of_an_evaluation_set_names_the_set(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", [{"question": "?", "solution": None}])
    other = write(tmp_path / "other.jsonl", [{"nums": [1, 2], "target": 3}])
    trained = write(tmp_path / "trained.jsonl", ROWS[:1])
    for settings, message in [
        ({"path": str(tmp_path / "none.json")}, "evaluation.sets.amc: .*none.json: No such file"),
        ({"path": empty}, "evaluation.sets.amc: .*has no row with an answer"),
        ({"path": other}, r"evaluation.sets.amc: .*no column question, solution \(there are nums"),
        ({}, "evaluation.sets.amc: task math cannot generate prompts; set the path of the set"),
        (
            {"path": trained},
            "1 training prompts are held-out .* task.train_path and evaluation.sets.amc.path",
        ),
        ({"options": {"box": 1}}, "evaluation.sets.amc: task math: .*box"),
    ]:
        with pytest.raises(BapoError, match=message):
            load_datasets(sets_config(tmp_path, amc=settings))


def test_a_training_prompt_that_a_set_generates_is_left_out_of_the_training_prompts() -> None:
    """The few problems of this distribution are in both, so many would be drawn twice."""
    options = {"numbers": [2], "max_number": 9, "min_target": 1, "max_target": 9}
    values = {
        "task": {"options": options, "train_prompts": 40, "test_prompts": 25},
        "rollout": {"prompts_per_step": 8},
        "optimizer": {"minibatch_prompts": 8},
    }
    datasets = load_datasets(config_from(values | {"evaluation": {"sets": {"small": {}}}}))
    test = {prompt.uid for prompt in datasets.test["small"].prompts}
    train = {prompt.uid for prompt in datasets.train.prompts}
    assert (len(test), len(train), len(test & train)) == (25, 40, 0)
    without_sets = load_datasets(config_from(values))
    assert test == {prompt.uid for prompt in without_sets.test["test"].prompts}
    assert train == {prompt.uid for prompt in without_sets.train.prompts}
