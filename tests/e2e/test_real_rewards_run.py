"""Runs whose rewards are any numbers train under every kind of method, and say what is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.buffer.api.wire import StepView
from services.stack.stack import Endpoints
from tests.e2e.test_run import Bapo

STEPS, B, G = 4, 8, 4
OF_BAPO = ("sync.every=2", "sync.reevaluate_every=2")
NO_THRESHOLD = "response counts as correct, although rewards differ"


def configuration(name: str, model: Path) -> dict[str, Any]:
    return {
        "name": name,
        "seed": 5,
        "steps": STEPS,
        "model": {"path": str(model)},
        "task": {"name": "scores", "train_prompts": 64, "test_prompts": 4},
        "rollout": {
            "prompts_per_step": B,
            "group_size": G,
            "max_prompt_tokens": 32,
            "max_response_tokens": 16,
        },
        "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": 4, "warmup_steps": 2},
        "evaluation": {"every": STEPS, "samples": 2},
        "checkpoint": {"every": 2},
    }


@pytest.fixture(scope="module")
def bapo(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    stack: Endpoints,
    small_model: Path,
) -> Bapo:
    directory = tmp_path_factory.mktemp("runs")
    return Bapo(directory, environment, stack, small_model, configuration)


def train(bapo: Bapo, name: str, *overrides: str) -> tuple[str, list[StepView]]:
    """Returns what a run printed, and its steps, all of which had a gradient."""
    printed = bapo.run(name, *overrides)
    steps = bapo.client(name).steps()
    assert len(steps) == STEPS
    assert all(step.trained and step.metrics["gradient_norm"] > 0 for step in steps)
    return printed, steps


@pytest.mark.parametrize(("status", "extent", "solved"), [("scored", "no", 0), ("ok", "every", G)])
def test_the_default_method_trains_on_rewards_without_a_notion_of_correct(
    bapo: Bapo, status: str, extent: str, solved: int
) -> None:
    name = f"bapo-{status}"
    printed, steps = train(bapo, name, *OF_BAPO, f"task.options.status={status}")
    for step in steps:
        assert step.bins[solved] == step.mixed == step.counts["fresh"] == B
        assert step.mean_reward == pytest.approx(0.75, abs=0.3)
    assert f"note: step 1: {extent} {NO_THRESHOLD} (mean 0." in printed
    assert f"note: in all steps, {extent} {NO_THRESHOLD}" in printed
    assert "equal rewards" not in printed
    report = (bapo.directory / "runs" / name / "report.html").read_text()
    assert f"Note: in all steps, {extent} {NO_THRESHOLD}" in report
    assert "held-out reward, final" in report
    first, *_, last = bapo.client(name).evaluations()
    assert first.mean_accuracy == last.mean_accuracy == solved / G
    assert 0.2 < first.mean_reward < 1.3
    assert {score.metric for score in first.scores} == {"mean", "pass"}
    uid = next(iter(bapo.client(name).all_prompts())).uid
    reasons = bapo.inspect("prompt", name, uid, "--step", "1")
    assert "with equal rewards" not in reasons


def test_a_threshold_gives_difficulty_to_buffers_and_replay(bapo: Bapo) -> None:
    """Half of the responses have a reward of 0.75 and more."""
    window = "replay.window={c2_range: [0.25, 0.5], c3_range: [0.5, 0.75]}"
    settings = ("task.solved_at=0.75", "reevaluate.c1=0.25", window, "batch.capacity=12")
    printed, steps = train(bapo, "bapo-solved", *OF_BAPO, *settings)
    bins = [sum(step.bins[k] for step in steps) for k in range(G + 1)]
    assert sum(map(bool, bins)) >= 4, "prompts have several difficulties"
    assert sum(step.counts["replayed"] for step in steps) > 0
    assert sum(step.counts["reevaluated_total"] for step in steps) > 0
    assert "although rewards differ" not in printed
    client = bapo.client("bapo-solved")
    assert 0.0 < client.evaluations()[-1].mean_accuracy < 1.0
    for entry in client.buffer("hard"):
        group = client.group(entry.group_id)
        assert sum(response.reward >= 0.75 for response in group.responses) <= 1
        assert all(response.correct == (response.reward >= 0.75) for response in group.responses)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dots"])
def test_other_methods_train_on_rewards_without_a_notion_of_correct(
    bapo: Bapo, algorithm: str
) -> None:
    _, steps = train(bapo, algorithm, f"algorithm={algorithm}")
    for step in steps:
        assert step.bins[0] == step.mixed == B
    if algorithm == "dots":
        assert sum(step.counts["replayed"] for step in steps) > 0


def test_an_evaluation_of_a_model_has_the_mean_reward_and_no_majority(bapo: Bapo) -> None:
    path = bapo.directory / "measured.yaml"
    path.write_text(yaml.safe_dump(configuration("measured", bapo.model)))
    arguments = ("eval", str(bapo.model), str(path), "task.solved_at=0.75", "--json")
    printed = bapo.inspect(*arguments)
    (measured,) = json.loads(printed[printed.index("[") :])
    assert 0.0 < measured["mean_accuracy"] < 1.0
    assert 0.2 < measured["mean_reward"] < 1.3
    assert {score["metric"] for score in measured["scores"]} == {"mean", "pass"}
