"""Fixtures for all tests: a real stack, a small model, and a task with pseudo-random verdicts."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from services.stack.stack import Endpoints, running_stack
from services.stack.supervisor import reserve_ports

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUMS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")

# The number of examples limits property tests: a deadline would fail on a busy machine.
settings.register_profile("bapo", deadline=None, max_examples=100)
settings.load_profile("bapo")

EASY = {"template": "short", "numbers": [2, 3], "max_number": 9, "min_target": 1, "max_target": 30}
"""Options of the Countdown task for small numbers."""

CHANCE = {"name": "chance", "train_prompts": 48, "test_prompts": 12}
"""Options of the task `chance` of tests/plug_in/: an epoch is 3 steps of 16 prompts."""

# Task plug-ins are discovered among the installed distributions, so the plug-in's directory must be
# on the import path of this process and of every process that a test starts.
PLUG_IN = str(Path(__file__).with_name("plug_in"))
if PLUG_IN not in sys.path:
    sys.path.append(PLUG_IN)
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if PLUG_IN not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_paths, PLUG_IN]))


# The tests' models are too small to gain from several threads, and threads that spin while they
# wait take the cores of other processes: on a busy machine the tests of the trainer took ten times
# as long. What `bapo run` starts has this number, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that skips itself if CI is set, because CI must provide every dependency."""
    report = yield
    return _fail_skips_in_ci(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fails a module that skips itself if CI is set."""
    report = yield
    return _fail_skips_in_ci(report)


def _fail_skips_in_ci(report: Any) -> Any:
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"tests must not skip when CI is set: {reason}"
    return report


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nothing listens, unless the test does."""
    with reserve_ports(1) as (port,):
        yield port


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """Yields a home directory for `bapo` that the user of Postgres can read.

    pytest's temporary directories are closed to other users.
    """
    directory = Path(tempfile.mkdtemp(prefix="bapo-home-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def stack(home: Path) -> Iterator[Endpoints]:
    """Yields the endpoints of a real Postgres, a real S3, the buffer service and the verifier."""
    with running_stack(home, 0) as endpoints:
        yield endpoints


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a tiny model with random weights.

    No test needs a trained model, because the task decides which responses are right. Random
    weights take a tenth of a second, so nothing is cached between processes or runs. Training took
    up to minutes, and its result differed between processors.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from tools.tiny_models.text import build_tokenizer, model_config

    directory = tmp_path_factory.mktemp("small-model")
    tokenizer = build_tokenizer()
    config = model_config(len(tokenizer))
    # This standard deviation makes the distributions over the 21 tokens uneven: their entropy is
    # 2.5 nats instead of 3.0.
    config.initializer_range = 0.1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    """Returns the environment variables of `bapo` subprocesses that use the tests' stack."""
    return {**os.environ, "BAPO_HOME": str(home), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yields a headless Chromium."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.skip("needs Chromium: run `make install-chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
