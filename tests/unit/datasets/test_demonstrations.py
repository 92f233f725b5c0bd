"""Demonstrations of training prompts: composed by the task, or read from the data and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig, load_config
from bapo_core.errors import BapoError
from bapo_core.tasks import get_task
from services.datasets import load_datasets

ROWS: list[dict[str, Any]] = [
    {"problem": "1 + 1?", "answer": "2", "solution": r"One and one are \boxed{2}."},
    {"problem": "2 + 2?", "answer": "4", "solution": r"Two and two are \boxed{5}."},
    {"problem": "3 + 3?", "answer": "6", "solution": r"Three and three are \boxed{6}."},
]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> RunConfig:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test.write_text(json.dumps({"problem": "4 + 4?", "answer": "8"}) + "\n")
    return load_config(
        None,
        [
            "task.name=math",
            f"task.train_path={train}",
            f"task.test_path={test}",
            "task.train_prompts=3",
            "rollout.prompts_per_step=3",
            "optimizer.minibatch_prompts=3",
            *overrides,
        ],
    )


@pytest.mark.parametrize("template", ["short", "think", "prefilled"])
@pytest.mark.parametrize("numbers", [[2], [3, 4], [5]])
def test_countdown_composes_a_correct_response(template: str, numbers: list[int]) -> None:
    options = {"template": template, "numbers": numbers}
    overrides = [f"task.options={json.dumps(options)}", "task.train_prompts=40"]
    shown = load_datasets(
        load_config(
            None,
            [*overrides, "rollout.prompts_per_step=8", "optimizer.minibatch_prompts=8"]
            + ["demonstrations.join=all"],
        )
    ).train
    task = get_task("countdown", **options)
    assert shown.demonstrated == len(shown.prompts) == 40
    assert shown.summary == "40 prompts, 40 with a demonstration"
    for prompt in shown.prompts:
        problem = {key: prompt.payload[key] for key in ("nums", "target")}
        assert task.verify(problem, prompt.payload["demonstration"]).status == "ok"


def test_prompts_have_no_demonstrations_unless_the_run_asks_for_them() -> None:
    overrides = ["rollout.prompts_per_step=8", "optimizer.minibatch_prompts=8"]
    small = [*overrides, "task.train_prompts=8"]
    plain = load_datasets(load_config(None, small))
    shown = load_datasets(load_config(None, [*small, "demonstrations.join=unsolved"]))
    assert all("demonstration" not in prompt.payload for prompt in plain.train.prompts)
    assert shown.train.name != plain.train.name
    assert shown.test["test"].name == plain.test["test"].name
    assert [p.uid for p in shown.train.prompts] == [p.uid for p in plain.train.prompts]


def test_a_column_of_the_data_is_mapped_and_wrong_ones_are_left_out(tmp_path: Path) -> None:
    mapped = "task.columns={demonstration: solution}"
    config = config_of(tmp_path, ROWS, mapped, "demonstrations.join=all")
    dataset = load_datasets(config).train
    assert [prompt.payload.get("demonstration") for prompt in dataset.prompts] == [
        ROWS[0]["solution"],
        None,
        ROWS[2]["solution"],
    ]
    assert dataset.summary.startswith("3 prompts, 2 with a demonstration")


@pytest.mark.parametrize(
    ("change", "mapping", "message"),
    [
        ({}, "", r"row 1: no column demonstration \(there are problem, answer, solution\); name"),
        ({"solution": 5}, "solution", "row 1: demonstration is 5; make it the text of a response"),
        (
            {"solution": "no idea"},
            "solution",
            r"but none is accepted \(math:.*: no_answer no complete \\boxed\{...\}\); map a column",
        ),
    ],
)
def test_data_without_demonstrations_are_refused(
    tmp_path: Path, change: dict[str, Any], mapping: str, message: str
) -> None:
    rows = [{**row, **change} for row in ROWS]
    mapped = [f"task.columns={{demonstration: {mapping}}}"] if mapping else []
    config = config_of(tmp_path, rows, *mapped, "demonstrations.join=all")
    with pytest.raises(BapoError, match=message):
        load_datasets(config)


def test_a_demonstration_below_the_reward_of_solved_prompts_is_refused(tmp_path: Path) -> None:
    settings = ("task.columns={demonstration: solution}", "task.solved_at=2")
    config = config_of(tmp_path, ROWS, *settings, "demonstrations.join=all")
    with pytest.raises(BapoError, match=r"accepted \(math:.*: reward 1, below task.solved_at=2\)"):
        load_datasets(config)


def test_a_mapped_column_needs_the_demonstrations_section(tmp_path: Path) -> None:
    config = config_of(tmp_path, ROWS, "task.columns={demonstration: solution}")
    with pytest.raises(BapoError, match="task math has no column demonstration"):
        load_datasets(config)
