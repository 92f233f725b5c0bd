"""Tests the script of `helm test` against the real services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.stack.stack import Endpoints
from tests.charts.helm import Object, one


@pytest.fixture
def script(dev: list[Object], tmp_path: Path) -> Path:
    """Returns the script as the pod mounts it."""
    path = tmp_path / "check.py"
    path.write_text(one(dev, "ConfigMap", "bapo-test")["data"]["check.py"])
    return path


def check(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "CHECK_READY_WITHIN_S": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_log_has_a_line_for_each_check(script: Path, stack: Endpoints) -> None:
    done = check(script, **stack.environment())
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "ok      the buffer service is ready",
            "ok      the token is accepted, a wrong one is refused",
            "ok      the verifier is ready",
            "ok      the verifier rewards a correct response and not an incorrect one",
            "all checks passed",
        ],
    )


def test_a_token_that_is_refused_fails(script: Path, stack: Endpoints) -> None:
    done = check(script, **{**stack.environment(), "BAPO_TOKEN": "another"})
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "restart them" in done.stdout


def test_a_service_that_does_not_answer_fails(script: Path, stack: Endpoints) -> None:
    # Nothing listens on port 9.
    done = check(script, **{**stack.environment(), "BAPO_BUFFER_URL": "http://127.0.0.1:9"})
    assert done.returncode == 1
    assert "the buffer service at http://127.0.0.1:9 is not ready: no response" in done.stdout
