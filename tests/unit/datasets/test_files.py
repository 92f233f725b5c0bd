"""Data sets are read from files: their formats, their columns, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from bapo_core.tasks import get_task
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
            path.write_text("\n".join(map(json.dumps, rows)))
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
    assert dataset.summary == "2 prompts, 1 rows without an answer left out"
    assert dataset.name == f"math-{digest_of_prompts(dataset.prompts)[:12]}"


def test_the_limit_is_one_of_rows(tmp_path: Path) -> None:
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
            r"row 2: no column problem \(there are question, answer\); .* \{problem: question\}",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_row(
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


def test_a_column_that_the_task_does_not_have_is_refused(tmp_path: Path) -> None:
    address = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(BapoError, match="task math has no column question; its columns are"):
        read_dataset(MATH, address, DataSources(), {"question": "problem"})


def test_a_problem_that_the_verifier_would_refuse_is_refused(tmp_path: Path) -> None:
    address = write(tmp_path / "data.jsonl", [{"problem": "x" * 100_000, "answer": "1"}])
    with pytest.raises(BapoError, match="row 1: the problem is longer than 100000 bytes"):
        read_dataset(MATH, address, DataSources(), {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
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


def test_training_and_held_out_prompts_are_named_by_their_part(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", ROWS)
    test = write(tmp_path / "test.jsonl", [{"question": "2+2?", "solution": 4}])
    config = math_config(train_path=train, test_path=test, columns=COLUMNS)
    datasets = load_datasets(config)
    assert [dataset.name.rsplit("-", 1)[0] for dataset in datasets] == ["math-train", "math-test"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"train_path": "x.jsonl"}, "task.test_path is not set; set both"),
        ({"test_path": "x.jsonl"}, "task.train_path is not set; set both"),
        ({}, "task math cannot generate prompts; set task.train_path and task.test_path"),
    ],
)
def test_half_of_the_data_is_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(BapoError, match=message):
        load_datasets(math_config(**task))
