"""What tests share: one real stack, and one small model that knows an easy task."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from bapo_core.tasks.countdown import CountdownTask
from services.stack.stack import Endpoints, running_stack

# Property tests are limited by examples, not by the clock of a shared machine.
settings.register_profile("bapo", deadline=None, max_examples=100)
settings.load_profile("bapo")

EASY = {"template": "short", "numbers": [2, 3], "max_number": 9, "min_target": 1, "max_target": 30}
"""Options of a Countdown that a model learns in seconds."""


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
def easy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, warm-started on the easy task: right sometimes, not always.

    Built once, however many processes run the tests: the first one there builds, the others wait.
    """
    from services.model import tiny

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "easy-model"
    with (shared / "easy-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "config.json").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiny, "EXAMPLES", 4000)
                tiny.build_tiny_model(directory, seed=0, steps=120, task=CountdownTask(**EASY))
    return directory


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    """For `bapo` in a process of its own, using the tests' stack."""
    return {**os.environ, "BAPO_HOME": str(home), "COLUMNS": "200"}
