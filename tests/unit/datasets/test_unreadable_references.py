"""A data set says which reference answers its task cannot read, and how its numbers are read."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from bapo_core.tasks import get_task
from services.cli.main import bapo
from services.datasets import DataSources, read_dataset

ROWS = [
    {"problem": "one", "answer": "42"},
    {"problem": "one", "answer": "42"},
    {"problem": "two", "answer": None},
    {"problem": "three", "answer": r"\foo{2} + 1"},
    {"problem": "four", "answer": r"\text{even}"},
    {"problem": "five", "answer": ["1", "3 4 5"]},
]


def write(directory: Path) -> Path:
    file = directory / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_unreadable_references_are_counted_with_their_rows(tmp_path: Path) -> None:
    dataset = read_dataset(get_task("math"), str(write(tmp_path)), DataSources(), {})
    assert [number for number, _ in dataset.unreadable] == [4, 6]
    assert "cannot read the reference answers of 2 of 4, for example of row 4" in dataset.summary


def test_the_command_lists_them_and_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(bapo, ["dataset", "check", str(write(tmp_path)), "--task", "math"])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        r"row 4: \foo{2} + 1 cannot be read as mathematics",
        "row 6: 3 4 5 cannot be read as mathematics",
        "2 of 4 reference answers cannot be read by the task math",
    ]


def test_a_data_set_that_can_be_read_passes_the_check(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps(ROWS[0]))
    result = CliRunner().invoke(bapo, ["dataset", "check", str(file), "--task", "math"])
    assert (result.exit_code, result.output) == (
        0,
        "0 of 1 reference answers cannot be read by the task math\n",
    )


def test_float32_answers_keep_their_decimals_and_decimals_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "problems.parquet"
    columns = {
        "problem": ["a", "b", "c"],
        "answer": pa.array([33.3, None, 0.1], pa.float32()),
    }
    pq.write_table(pa.table(columns), file)
    dataset = read_dataset(get_task("math"), str(file), DataSources(), {})
    assert [prompt.payload["answer"] for prompt in dataset.prompts] == ["33.3", "0.1"]
    columns["answer"] = pa.array([[33.3], [0.1, 2.5], None], pa.list_(pa.float32()))
    pq.write_table(pa.table(columns), file)
    dataset = read_dataset(get_task("math"), str(file), DataSources(), {})
    assert [prompt.payload["answer"] for prompt in dataset.prompts] == ["33.3", ["0.1", "2.5"]]
    columns["answer"] = pa.array([Decimal("33.30"), Decimal("-1"), None], pa.decimal128(6, 2))
    pq.write_table(pa.table(columns), file)
    dataset = read_dataset(get_task("math"), str(file), DataSources(), {})
    assert [prompt.payload["answer"] for prompt in dataset.prompts] == ["33.30", "-1.00"]
