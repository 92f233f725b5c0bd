"""Logs are JSON lines that name the component and the run, with all extra fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from services.common.logs import configure_logs

log = logging.getLogger("tests.logs")


@pytest.fixture(autouse=True)
def restored_root_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BAPO_RUN", raising=False)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The only line on standard error."""
    (text,) = capsys.readouterr().err.splitlines()
    entry: dict[str, Any] = json.loads(text)
    return entry


def test_a_line_names_component_run_and_every_extra_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAPO_RUN", "countdown")
    configure_logs("trainer")
    log.info("published %s", "v7", extra={"version": 7, "replicas": ["r0", "r1"], "seconds": 0.5})
    entry = line(capsys)
    assert datetime.fromisoformat(entry.pop("time")).tzinfo is not None
    assert entry == {
        "level": "info",
        "component": "trainer",
        "run": "countdown",
        "message": "published v7",
        "version": 7,
        "replicas": ["r0", "r1"],
        "seconds": 0.5,
    }


def test_a_process_without_a_run_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("buffer")
    log.warning("late")
    assert "run" not in line(capsys)


def test_an_exception_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("buffer")
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("failed")
    entry = line(capsys)
    assert (entry["level"], entry["message"]) == ("error", "failed")
    assert entry["exception"].endswith("ValueError: wrong")


def test_access_logs_of_libraries_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("buffer")
    logging.getLogger("httpx").info("GET /health")
    assert capsys.readouterr().err == ""
