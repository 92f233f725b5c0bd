"""Tests a user's own reward function on a cluster: how its file gets there, and what becomes of a
function that fails.

`make test-cluster` runs them, with the images of this version.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo_core.config import merge, nest
from pipelines.parameters import parameters_of
from services.cli.main import main
from services.cli.reward_files import store_parameters
from services.cli.service import connect
from tests.cluster.argo import PipelineRun, StepFailed
from tests.cluster.conftest import ROOT, Release
from tests.cluster.test_cluster import STEPS

pytestmark = pytest.mark.cluster

EXAMPLE = "examples/reward-function.yaml"
WORKER = {"gpus_per_worker": 0, "cpu_per_worker": "250m", "memory_per_worker": "2Gi"}
KEYS: dict[str, Any] = {
    "steps": STEPS,
    "task.train_path": "dataset:numbers-train",
    "task.test_path": "dataset:numbers-test",
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.engine.kind": "vllm",
    "optimizer.minibatch_prompts": 8,
    "evaluation.every": STEPS,
    "checkpoint.every": 3,
}


FUNCTIONS = """
def score(completions, numbers, **columns):
    digits = ["".join(map(str, given)) for given in numbers]
    return [
        sum(character in given for character in text) / max(len(text), 1)
        for text, given in zip(completions, digits)
    ]

def brackets(completions, **columns):
    return [float("(" in text) for text in completions]
"""
"""The first one gives the share of the characters that are digits of the prompt's numbers, so that
rewards are any numbers from the first step on."""


@pytest.fixture
def user(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands ask the release's buffer service, which stores the example's data first."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("BAPO_BUFFER_URL", release.buffer_url)
    monkeypatch.setenv("BAPO_TOKEN", release.token)
    for part in ("train", "test"):
        name = f"numbers-{part}"
        file = f"examples/data/{name}.jsonl"
        main(["dataset", "upload", file, "--task", "function", "--name", name])


@pytest.mark.usefixtures("user", "no_run")
def test_a_run_is_trained_by_the_reward_functions_of_a_file(
    release: Release, tmp_path: Path
) -> None:
    """The parameters are those of `bapo pipeline submit`, which stores the file."""
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    addresses = json.dumps([f"{file}:score", f"{file}:brackets"])
    given = {"name": "rewarded", "task.reward": addresses, **KEYS, **WORKER}
    arguments = [f"{key}={value}" for key, value in given.items()]
    parameters = store_parameters(parameters_of(EXAMPLE, arguments), connect)
    run = PipelineRun(release.namespace, release.package, parameters)
    run.execute()
    client = release.client("rewarded")
    assert client.run_state().status == "finished", run.logs

    functions = runpy.run_path(str(file))
    groups = [client.group(group) for group in {item.group_id for item in client.responses()}]
    rewards = []
    for group in groups:
        numbers = group.payload["columns"]["numbers"]
        for response in group.responses:
            (score,) = functions["score"]([response.text], [numbers])
            (brackets,) = functions["brackets"]([response.text])
            parts = {"answer": score, "brackets": brackets}
            assert {name: response.reward_parts[name] for name in parts} == pytest.approx(parts)
            assert response.reward == pytest.approx(score + 0.2 * brackets)
            rewards.append(response.reward)
    assert len(rewards) >= 8 * 4
    assert len(set(rewards)) > 2, "every response had the same reward"


@pytest.mark.usefixtures("user", "no_run")
def test_a_reward_function_that_fails_ends_the_pipeline_with_its_line(
    release: Release, tmp_path: Path
) -> None:
    """`bapo config push` stores the file. Only the collector, whose container Kubernetes restarts,
    learns that the function fails."""
    (tmp_path / "rewards.py").write_text(
        "def score(completions, **columns):\n    return [float(completions[0])]\n"
    )
    config = yaml.safe_load((ROOT / EXAMPLE).read_text())
    config["task"]["reward"] = f"{tmp_path}/rewards.py:score"
    del config["reward"]
    for key, value in KEYS.items():
        config = merge(config, nest(key, value))
    file = tmp_path / "faulty.yaml"
    file.write_text(yaml.safe_dump(config))
    main(["config", "push", str(file), "--name", "faulty"])
    fields = {"bapo_run": "faulty", "stored_config": "faulty", **WORKER}
    run = PipelineRun(release.namespace, release.package, fields)
    reason = (
        r"by the collector: .*rewards.py:score raised ValueError: .*rewards.py, line 2\); tried"
    )
    with pytest.raises(StepFailed, match=f"(?s)train: .*was stopped meanwhile {reason}"):
        run.execute()
    assert not release.jobs()
    assert release.client("faulty").run_state().status == "stopped"
