"""The math task extracts answers, compares them, and reads files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_core.tasks import Task, get_task
from bapo_core.tasks.mathematics import MAX_ANSWER, MathTask

TASK = MathTask()


def verdict(gold: str, response: str, task: MathTask = TASK) -> tuple[float, str]:
    verdict = task.verify({"problem": "?", "answer": gold}, response)
    return verdict.reward, str(verdict.status)


RIGHT = [
    ("42", r"so \boxed{42}"),
    ("42", r"\boxed{41} no, \boxed{ 42 }"),
    ("42", r"\boxed{\boxed{42}}"),
    ("42", r"\fbox{42}"),
    ("42", r"it is \boxed{x = 42}"),
    ("42", r"\boxed{6 \cdot 7 = 42}"),
    ("42", r"\boxed{42 \text{ apples}}"),
    ("42", r"the set \{ \boxed{42}"),
    ("$42$", r"\boxed{42}"),
    (r"\boxed{42}", r"\boxed{84/2}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac12", r"\boxed{\dfrac{2}{4}}"),
    (r"\frac{1}{3}", r"\boxed{0.333333}"),
    ("0.0000001", r"\boxed{10^{-7}}"),
    ("1000", r"\boxed{1,000}"),
    ("x^2 + 1", r"\boxed{1 + x^2}"),
    ("(x+1)^2", r"\boxed{x^2 + 2x + 1}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("(1, 2)", r"\boxed{(1, 2)}"),
    ("[0, 1)", r"\boxed{[0, 1)}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\text{Monday}", r"\boxed{\text{Monday}}"),
    (r"\text{no solution}", r"\boxed{\text{no  solution}}"),
    (r"\infty", r"\boxed{\infty}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    ("42", "42"),
    ("42", "The answer is 42."),
    ("42", "so $x = 42$"),
    (r"\frac{1}{2}", r"\frac{1}{2}"),
]

WRONG = [
    ("42", r"\boxed{41}", "wrong_value"),
    ("42", r"\boxed{42} no, \boxed{41}", "wrong_value"),
    ("42", r"\boxed{7 = 42}", "wrong_value"),
    ("42", r"\boxed{x = 41 = 42}", "wrong_value"),
    ("42", r"\boxed{41, 42}", "wrong_value"),
    ("42", r"\boxed{41 \text{ or } 42}", "wrong_value"),
    ("10^{-7}", r"\boxed{0.0}", "wrong_value"),
    ("0.001", r"\boxed{0.00100001}", "wrong_value"),
    (r"\frac{1}{3}", r"\boxed{0.33}", "wrong_value"),
    ("(1, 2)", r"\boxed{(2, 1)}", "wrong_value"),
    ("[0, 1)", r"\boxed{[0, 1]}", "wrong_value"),
    ("x", r"\boxed{y}", "wrong_value"),
    ("42", r"\boxed{\frac{0}{0}}", "wrong_value"),
    ("42", r"\boxed{}", "no_answer"),
    ("42", r"\boxed{42", "no_answer"),
    ("42", r"I considered 42, but \boxed{4", "no_answer"),
    ("42", "", "no_answer"),
    ("42", "none", "no_answer"),
    ("42", r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}", "too_large"),
    ("42", "\\boxed{42\x00}", "parse_error"),
    ("42", "\\boxed{\ud800}", "parse_error"),
    ("42", r"\boxed{\frac{42}}", "parse_error"),
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_right(gold: str, response: str) -> None:
    assert verdict(gold, response) == (1.0, "ok")


@pytest.mark.parametrize(("gold", "response", "status"), WRONG)
def test_wrong(gold: str, response: str, status: str) -> None:
    assert verdict(gold, response) == (0.0, status)


def test_an_answer_outside_a_box_counts_unless_told_otherwise() -> None:
    strict = MathTask(boxed_only=True)
    assert verdict("42", "the answer is 42", strict) == (0.0, "no_answer")
    assert verdict("42", r"\boxed{42}", strict) == (1.0, "ok")


def test_it_is_a_task_and_poses_problems() -> None:
    task = get_task("math", instruction="Box it.")
    assert isinstance(task, Task)
    assert task.render({"problem": "1+1?", "answer": "2"}) == [
        {"role": "user", "content": "1+1?\n\nBox it."}
    ]


def test_a_problem_keeps_its_name_whatever_its_blanks_and_answer() -> None:
    uid = TASK.uid({"problem": "What is\n 1+1?", "answer": "2"})
    # For ever: stored runs go by it.
    assert uid == TASK.uid({"problem": " What is 1+1?", "answer": "3"}) == "math:31adf3e245f99d7b"
    assert uid != TASK.uid({"problem": "What is 1+2?", "answer": "3"})


ROWS = [
    {"problem": "1+1?", "answer": "2", "level": 1},
    {"problem": "1+2?", "answer": "3", "level": 1},
    {"problem": "1+1?", "answer": "2.0", "level": 2},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_are_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"problems.{suffix}"
    if suffix == "jsonl":
        file.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    both = [{"problem": "1+1?", "answer": "2"}, {"problem": "1+2?", "answer": "3"}]
    assert TASK.load(file) == both
    assert TASK.load(file, limit=1) == both[:1]


def test_an_answer_may_be_a_number(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"problem": "1+1?", "answer": 2}')
    assert TASK.load(file) == [{"problem": "1+1?", "answer": "2"}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"problem": "?"}', "row 2: needs the keys problem and answer"),
        ('{"problem": "?", "answer": null}', "row 2: answer is None"),
        ('{"problem": "?", "answer": " "}', "row 2: answer is ' '"),
        ('{"problem": "?", "answer": true}', "row 2: answer is True"),
        ('{"problem": 3, "answer": "3"}', "row 2: problem is 3"),
        ("{", "row 2: not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(ValueError, match=why):
        TASK.load(file)


def test_a_file_without_the_columns_is_named(tmp_path: Path) -> None:
    file = tmp_path / "problems.parquet"
    pq.write_table(pa.table({"question": ["?"], "answer": ["2"]}), file)
    with pytest.raises(ValueError, match=r"no column problem \(there are question, answer\)"):
        TASK.load(file)
    with pytest.raises(ValueError, match=r"name the file \.parquet or \.jsonl"):
        TASK.load(tmp_path / "problems.csv")
