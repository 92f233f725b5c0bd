"""A local run keeps its home in order."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from bapo_core.config import load_config
from services.cli.local_run import LocalRun, _make_scratch


def test_an_attempt_deletes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    def run(name: str) -> LocalRun:
        return LocalRun(load_config(None, [f"name={name}"]), Mock(), tmp_path, tmp_path, Mock())

    other, left = _make_scratch(run("killed-2")), _make_scratch(run("killed"))
    (left / "trainer").mkdir()
    scratch = _make_scratch(run("killed"))
    assert sorted((tmp_path / "scratch").iterdir()) == sorted([other, scratch])
