"""A comparison groups runs by their labels, and counts what an accuracy has cost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from services.buffer.api.wire import Evaluation, Migration, RunState, StepView
from services.cli import shared_runs
from services.cli.commands import compare
from services.cli.variants import PlannedRun, parse_variant, plan_runs
from services.report.comparison import (
    COSTS,
    RunResult,
    explain_decision,
    explained_scores_of,
    write_comparison,
)
from services.report.summary import RunHistory

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def step(number: int, rollouts: int, seconds: float) -> StepView:
    return StepView(
        step=number,
        r_tot=0.5,
        c2=0.125,
        c3=0.25,
        counts={"fresh": 1},
        rollouts=rollouts,
        tokens=10 * rollouts,
        metrics={
            "gradient_norm": 1.0,
            "entropy": 2.0,
            "response_length": 3.0,
            "seconds/update": seconds,
            "seconds/wait": 1.0,
        },
        bins=[1, 0],
        mean_reward=0.0,
        reward_parts={},
        committed_at=NOW,
    )


def evaluation(version: int, accuracy: float, reward: float | None = None) -> Evaluation:
    zero = round(8 * (1 - accuracy))
    return Evaluation(
        version=version,
        evaluation_set="test",
        mean_accuracy=accuracy,
        mean_reward=accuracy if reward is None else reward,
        bins=[zero, 8 - zero],
        prompts=8,
        tokens=0,
        scores=[],
    )


def result(
    label: str,
    seed: int,
    accuracies: list[float],
    rollouts: int,
    *overrides: str,
    rewards: Sequence[float | None] = (None, None, None),
) -> RunResult:
    """Builds a run of four steps with evaluations before, halfway and after."""
    config = load_config(None, [f"seed={seed}", "steps=4", "name=run", *overrides])
    evaluations = list(map(evaluation, (1, 3, 5), accuracies, rewards))
    state = RunState(
        name=config.name,
        status="finished",
        config=config,
        train_dataset="train",
        test_datasets={"test": "test"},
        current_step=4,
        attempt=1,
        created_at=NOW,
    )
    history = RunHistory(
        state=state,
        config=config,
        steps=[step(number, rollouts, 0.5) for number in range(1, 5)],
        evaluations=evaluations,
        migration=Migration(before=1, after=5, matrix=[[0, 0], [0, 0]], unlocked_fraction=0.25),
        sets=[],
        unlocked_over_time=[0.0, 0.0, 0.25],
        unlocked_training_prompts=(0, 1),
        sync_windows=[],
    )
    return RunResult(history, label)


def test_costs_are_those_of_the_steps_before_an_evaluation() -> None:
    run = result("a", 1, [0.0, 0.5, 1.0], rollouts=10)
    spent = {name: run.spent_at_evaluations(cost) for name, cost in COSTS.items()}
    assert spent == {
        "training steps": [0, 2, 4],
        "training responses": [0, 20, 40],
        "generated tokens": [0, 200, 400],
        "seconds of the trainer": [0, 3, 6],
    }


def test_runs_of_one_algorithm_are_compared_by_their_labels(tmp_path: Path) -> None:
    runs = [
        result("v5", 1, [0.0, 0.25, 0.5], rollouts=10),
        result("v10", 1, [0.0, 0.5, 0.75], rollouts=20),
        result("v5", 2, [0.0, 0.25, 0.25], rollouts=10),
        result("v10", 2, [0.0, 0.5, 0.75], rollouts=20),
    ]
    page = write_comparison(runs, tmp_path).read_text()
    found = json.loads((tmp_path / "comparison.json").read_text())
    table, differences = found["table"], found["differences"]
    assert set(table) == {"v5", "v10"}
    # The mean of the evaluations after the base model's, then over the seeds.
    assert table["v5"]["accuracy at equal steps"]["mean"] == 0.3125
    assert table["v5"]["best checkpoint at equal steps"]["mean"] == 0.375
    # At the 20 and 40 responses of the cheaper variant's evaluations, the other one has .25 and .5.
    assert table["v10"]["accuracy at 40 rollouts"]["mean"] == 0.375
    assert table["v10"]["best checkpoint at 40 rollouts"]["mean"] == 0.5
    assert set(differences) == {"v10"}
    gain = differences["v10"]["accuracy at equal steps"]
    assert (gain["mean"], gain["seeds"]) == (0.3125, 2)
    assert gain["half_width"] == pytest.approx(12.706 * 0.0625, rel=1e-4)
    assert [run["label"] for run in found["runs"]] == ["v5", "v10", "v5", "v10"]
    for title in (
        *(f"Held-out accuracy by {name}" for name in COSTS),
        *("Gradient norm", "Entropy of the policy", "Tokens of a response"),
        "Difference from v5 with the same seed: mean; 2 seeds are too few for an interval",
    ):
        assert title in page
    assert "+0.312</td>" in page, "an interval of 12.7 standard errors says nothing"
    more = [
        *runs,
        result("v5", 3, [0.0, 0.25, 0.25], rollouts=10),
        result("v10", 3, [0.0, 0.5, 0.75], rollouts=20),
    ]
    assert "+0.333 ± 0.179</td>" in write_comparison(more, tmp_path).read_text()


def test_one_seed_gives_differences_without_an_interval(tmp_path: Path) -> None:
    runs = [result(label, 1, [0.0, 0.0, value], 10) for label, value in (("a", 0.5), ("b", 0.25))]
    write_comparison(runs, tmp_path)
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["differences"]["b"]["accuracy at equal steps"] == {"mean": -0.125, "seeds": 1}
    assert "standard_deviation" not in found["table"]["a"]["accuracy at equal steps"]
    page = (tmp_path / "comparison.html").read_text()
    assert "<td>0.250</td>" in page
    assert "± 0.000" not in page


def test_the_page_claims_no_more_in_common_than_there_is(tmp_path: Path) -> None:
    same = [result(label, 1, [0.0, 0.0, 0.5], 10) for label in "ab"]
    page = write_comparison(same, tmp_path).read_text()
    assert "4 steps from the same base model (mean held-out accuracy 0.000) on the same" in page
    changed = ["steps=8", "model.path=other", "task.train_prompts=4096"]
    page = write_comparison([same[0], result("b", 1, [0.5, 0.5, 1.0], 10, *changed)], tmp_path)
    text = page.read_text()
    assert "4 to 8 steps from different base models" in text
    assert "on different prompts" in text
    assert "final accuracy" in text
    assert "accuracy at 4 steps" in text
    assert "accuracy at equal steps" not in text


def scores(values: Mapping[str, Sequence[float]]) -> list[RunResult]:
    return [
        result(label, seed, [0.0, accuracy, accuracy], 10)
        for label, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies, start=1)
    ]


def test_variants_whose_difference_is_not_decided_share_their_places(tmp_path: Path) -> None:
    runs = scores({"low": [0.1, 0.12, 0.11], "a": [0.5, 0.52, 0.54], "b": [0.52, 0.51, 0.55]})
    page = write_comparison(runs, tmp_path).read_text()
    found = json.loads((tmp_path / "comparison.json").read_text())
    decision = found["resolution"]["accuracy at equal steps"]
    assert decision["places"] == {"low": [3, 3], "a": [1, 2], "b": [1, 2]}
    assert decision["ahead_of"] == {"low": [], "a": ["low"], "b": ["low"]}
    assert decision["degrees_of_freedom"] == 4
    assert 0.02 < decision["smallest_difference"] < 0.1
    assert "<td>1-2</td>" in page
    assert f"Differences above {decision['smallest_difference']:.3f} are decided" in page
    assert found["runs"][0]["evaluations"][1] == {
        "accuracy": 0.1,
        "reward": 0.1,
        "training steps": 2,
        "training responses": 20,
        "generated tokens": 200,
        "seconds of the trainer": 3,
    }


def test_fewer_prompts_at_0_are_better(tmp_path: Path) -> None:
    values = {"low": [0.125, 0.25, 0.125], "high": [0.875, 0.875, 0.75]}
    write_comparison(scores(values), tmp_path)
    found = json.loads((tmp_path / "comparison.json").read_text())["resolution"]
    assert found["held-out prompts at 0"]["places"] == {"low": [2, 2], "high": [1, 1]}
    assert found["held-out prompts at 0"]["ahead_of"] == {"low": [], "high": ["low"]}
    assert "rollouts" not in found


def test_one_seed_gives_no_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = scores({"a": [0.9], "b": [0.1]})
    page = write_comparison(runs, tmp_path).read_text()
    found = json.loads((tmp_path / "comparison.json").read_text())["resolution"]
    assert set(found.values()) == {None}
    assert page.count("no variant has a place") == 1
    assert "Places that" not in page
    compare._print_table(runs, Console(width=40))
    printed = capsys.readouterr().out
    assert printed.count("no variant has a place") == 1
    assert printed.count("place -\n") == 4  # two variants at equal steps and at equal tokens


FUNCTION = ("task.reward=rewards.py:score", "task.train_path=a.jsonl", "task.test_path=b.jsonl")


@pytest.mark.parametrize(
    ("overrides", "accuracies", "what"),
    [
        (FUNCTION, [0.0, 0.25, 0.5], "reward"),
        ((*FUNCTION, "task.solved_at=1.5"), [0.0, 0.25, 0.5], "accuracy"),
        ((), [0.0, 0.25, 0.5], "accuracy"),
        ((), [0.0, 0.0, 0.0], "reward"),  # a task class that calls no response correct
    ],
)
def test_runs_without_a_notion_of_correct_are_compared_by_their_rewards(
    tmp_path: Path,
    overrides: Sequence[str],
    accuracies: list[float],
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [
        result(label, seed, accuracies, 10, *overrides, rewards=[0.5, 1.0, final + seed / 64])
        for label, final in (("a", 2.0), ("b", -1.0))
        for seed in (1, 2, 3)
    ]
    page = write_comparison(runs, tmp_path).read_text()
    found = json.loads((tmp_path / "comparison.json").read_text())
    of_reward = what == "reward"
    best = [found["table"][label]["best checkpoint at equal steps"]["mean"] for label in "ab"]
    assert best == ([2.03125, 1.0] if of_reward else [accuracies[-1]] * 2)
    if of_reward:
        decided = found["resolution"]["reward at equal steps"]
        assert decided["places"] == {"a": [1, 1], "b": [2, 2]}
    assert f"mean held-out {what} {0.5 if of_reward else accuracies[0]:.3f}" in page
    assert all(f"Held-out {what} by {name}" in page for name in COSTS)
    compare._print_table(runs, Console(width=40))
    printed = capsys.readouterr().out
    assert f"{what} at equal steps, the mean" in printed


@pytest.mark.parametrize("label", ["_base", "a $x$ b", r"a $\frac$ b"])
def test_a_label_is_text_in_the_charts_too(label: str, tmp_path: Path) -> None:
    runs = [result(label, 1, [0.0, 0.5, 0.5], 10), result("other", 1, [0.0, 0.5, 0.5], 10)]
    page = write_comparison(runs, tmp_path).read_text()
    assert label in [text.strip() for text in re.findall(r"<text [^>]*>(.*?)</text>", page)]


def test_more_variants_than_colours_are_all_drawn(tmp_path: Path) -> None:
    runs = [result(f"variant-{number}", 1, [0.0, 0.5, 0.5], 10) for number in range(9)]
    page = write_comparison(runs, tmp_path).read_text()
    curves = page[page.index("Held-out accuracy by training steps") :].split("</figure>")[0]
    assert all(f"variant-{number}" in curves for number in range(9))


def test_the_page_compares_the_runs_that_are_finished_when_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = result("a", 1, [0.0, 0.25, 0.5], rollouts=10)

    def train(planned: PlannedRun, *_: object) -> tuple[RunResult, bool]:
        if planned.label == "b":
            raise BapoError("the trainer failed")
        return finished, True

    monkeypatch.setattr(shared_runs, "train_run", train)
    endpoints = Mock(buffer_url="http://127.0.0.1:8700", token="t0ken")
    monkeypatch.setattr(shared_runs, "find_or_start_stack", lambda *_: nullcontext(endpoints))
    config = finished.history.config
    runs = [
        PlannedRun(label, config.model_copy(update={"name": f"compared-{label}"}))
        for label in ("a", "b")
    ]
    with pytest.raises(BapoError, match="the trainer failed"):
        compare.train_and_compare(
            runs, directory=tmp_path, home=tmp_path, console=Console(), port=0
        )
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["label"] for run in found["runs"]] == ["a"]
    assert (tmp_path / "comparison.html").exists()
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "dashboard  http://127.0.0.1:8700/"


def test_the_resolution_is_explained_at_equal_steps_and_at_equal_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # At equal steps neither variant is ahead, but `dear` generates twice as many tokens per step.
    runs = [
        result(label, seed, [0.0, 0.25, 0.5 + shift / 64], rollouts)
        for label, rollouts in (("cheap", 10), ("dear", 20))
        for seed, shift in ((1, 0), (2, 1), (3, 2 if label == "dear" else 1))
    ]
    steps, tokens = (score.name for score, _ in explained_scores_of(runs))
    assert steps == "accuracy at equal steps"
    assert tokens.startswith("accuracy at ")
    assert tokens.endswith(" tokens")
    page = write_comparison(runs, tmp_path).read_text()
    found = json.loads((tmp_path / "comparison.json").read_text())["resolution"]
    compare._print_table(runs, Console(width=40))
    printed = capsys.readouterr().out
    for name, places in ((steps, ["1-2", "1-2"]), (tokens, ["1", "2"])):
        explained = explain_decision(found[name])
        assert f"<p>{name.capitalize()}: {explained}</p>" in page
        heading, *rows, explanation = printed[printed.index(f"{name}, the mean") :].splitlines()[:4]
        assert [row.rsplit("place ", 1)[1] for row in rows] == places, heading
        assert explanation == explained


@pytest.mark.parametrize(
    ("overrides", "interval"),
    [
        (["task.test_prompts=500"], None),
        (["task.test_prompts=200"], "at most 200 held-out prompts: on other prompts like them an"),
        (["evaluation.sets={a: {prompts: 100}, b: {prompts: 500}}"], "differs by up to ± 0.098"),
        (["evaluation.sets={a: {prompts: 100}, b: {prompts: 500}}", "evaluation.primary=b"], None),
    ],
)
def test_few_held_out_prompts_are_warned_about(overrides: list[str], interval: str | None) -> None:
    variants = [parse_variant("a:"), parse_variant("b: steps=4")]
    warnings = list(compare._warn_of_few_prompts(plan_runs(None, overrides, variants, [1])))
    assert len(warnings) == (0 if interval is None else 1)
    assert all(interval is not None and interval in each for each in warnings)


def test_each_warning_names_the_variants_that_it_is_about() -> None:
    variants = [parse_variant("short: steps=4"), parse_variant("long: steps=400")]
    shared = ["optimizer.warmup_steps=8", "sync.lag=1"]
    warnings = compare._list_warnings(plan_runs(None, shared, variants, [1, 2]))
    about = [text for text in warnings if "optimizer.warmup_steps" in text or "sync.lag" in text]
    both, short = sorted(about, key=lambda text: text.startswith("short: "))
    assert short.startswith("short: optimizer.warmup_steps is 8 and steps is 4: no step has")
    assert both.startswith("sync.lag is 1 with reevaluate.enabled: ")
