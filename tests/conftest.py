"""What tests share: one real stack, one small model, and a task whose verdicts are drawn by lot."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from services.stack.stack import Endpoints, running_stack

# Property tests are limited by examples, not by the clock of a shared machine.
settings.register_profile("bapo", deadline=None, max_examples=100)
settings.load_profile("bapo")

EASY = {"template": "short", "numbers": [2, 3], "max_number": 9, "min_target": 1, "max_target": 30}
"""Options of a Countdown with small numbers."""

CHANCE = {"name": "chance", "train_prompts": 48, "test_prompts": 12}
"""The task `chance` of tests/plug_in/, with prompts for 16 at each of 3 steps in an epoch."""

# A plug-in is an installed distribution. This one is on the path of every process that a test
# starts, and of the test's own.
PLUG_IN = str(Path(__file__).with_name("plug_in"))
if PLUG_IN not in sys.path:
    sys.path.append(PLUG_IN)
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if PLUG_IN not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_paths, PLUG_IN]))


# The models of tests are too small to share between cores, and threads that spin while they wait
# take the cores of other processes: on a busy machine the tests of the trainer took ten times as
# long. What a test starts as `bapo run` sets its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips fails where the variable CI is set: what it needs is missing there."""
    report = yield
    return _failed_in_ci(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself fails in the same way."""
    report = yield
    return _failed_in_ci(report)


def _failed_in_ci(report: Any) -> Any:
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"must not skip where CI is set: {reason}"
    return report


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """Not under pytest's own directory, which it closes to the user that Postgres runs as."""
    directory = Path(tempfile.mkdtemp(prefix="bapo-home-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def stack(home: Path) -> Iterator[Endpoints]:
    """A real Postgres, a real S3, the buffer service and the verifier."""
    with running_stack(home, 0) as endpoints:
        yield endpoints


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a model of the tiny architecture with random weights.

    No test needs a model that knows anything: what the answers are worth is up to the task. Random
    weights take a tenth of a second, so that there is nothing to share between processes or to
    keep between runs; a trained model took up to minutes and was another one on every processor.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from services.model.tiny import build_tokenizer, model_config

    directory = tmp_path_factory.mktemp("small-model")
    tokenizer = build_tokenizer()
    config = model_config(len(tokenizer))
    # Spread enough that the distributions of the 21 tokens are uneven: 2.5 nats instead of 3.0.
    config.initializer_range = 0.1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    """For `bapo` in a process of its own, using the tests' stack."""
    return {**os.environ, "BAPO_HOME": str(home), "COLUMNS": "200"}
