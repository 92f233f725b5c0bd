"""Trains the models of the examples until their held-out accuracy has risen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bapo_core.config import load_config
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation
from services.cli.evaluate import evaluate_directory
from services.stack.stack import Endpoints

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Examples:
    """Runs `bapo run` on examples of the repository, on the tests' stack."""

    def __init__(self, directory: Path, environment: dict[str, str], stack: Endpoints) -> None:
        self.directory = directory
        self._environment = environment
        self._stack = stack

    def run(self, example: str, name: str, *overrides: str) -> list[Evaluation]:
        """Returns the evaluations of the held-out prompts, oldest first."""
        self.bapo("run", str(ROOT / "examples" / example), f"name={name}", *overrides)
        client = BufferClient(self._stack.buffer_url, self._stack.token, run=name)
        return sorted(client.evaluations(), key=lambda evaluation: evaluation.version)

    def bapo(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", *arguments],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def examples(tmp_path: Path, environment: dict[str, str], stack: Endpoints) -> Examples:
    return Examples(tmp_path, environment, stack)


def test_the_tiny_vision_model_learns_from_diagrams(examples: Examples) -> None:
    """Accuracy rises by far more than its confidence interval, and without images there is none."""
    name = "diagrams"
    first, *_, last = examples.run("geometry.yaml", name)
    assert last.mean_accuracy >= first.mean_accuracy + 0.1
    examples.bapo("checkpoints", name, "--export", "exported")
    config = load_config(ROOT / "examples/geometry.yaml", [])
    (blank,) = evaluate_directory(config, examples.directory / "exported", blank_images=True)
    assert blank.mean_accuracy <= last.mean_accuracy / 4


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    "adapters",
    [
        pytest.param([], id="all weights"),
        pytest.param(["lora.rank=16", "optimizer.learning_rate=3.0e-4"], id="adapters"),
    ],
)
def test_a_real_language_model_learns(examples: Examples, engine: str, adapters: list[str]) -> None:
    """SmolLM2-135M adds numbers correctly twice as often after 20 steps. Needs `make real-lm`."""
    model = ROOT / "models/smollm2-135m-instruct"
    paths = [
        f"model.path={model}",
        f"task.train_path={ROOT / 'examples/data/sums-train.jsonl'}",
        f"task.test_path={ROOT / 'examples/data/sums-test.jsonl'}",
    ]
    name = f"sums-{engine}-{len(adapters)}"
    first, *_, last = examples.run(
        "maths-smollm2.yaml", name, f"rollout.engine={engine}", "steps=20", *paths, *adapters
    )
    assert 0.1 <= first.mean_accuracy <= 0.3
    assert last.mean_accuracy >= 2 * first.mean_accuracy
