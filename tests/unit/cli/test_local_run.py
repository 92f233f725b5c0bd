"""A local run keeps its home in order."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from bapo_core.config import config_from, load_config
from services.cli.commands.run import print_results
from services.cli.console import plain_console
from services.cli.local_run import (
    LocalRun,
    _make_scratch,
    create_run,
    engine_share,
    next_free_name,
)
from services.cli.service import format_addresses
from services.datasets import Dataset
from services.stack.supervisor import ProcessFailed, Supervisor


def test_an_attempt_deletes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    def run(name: str) -> LocalRun:
        return LocalRun(load_config(None, [f"name={name}"]), Mock(), tmp_path, tmp_path, Mock())

    other, left = _make_scratch(run("killed-2")), _make_scratch(run("killed"))
    (left / "trainer").mkdir()
    scratch = _make_scratch(run("killed"))
    assert sorted((tmp_path / "scratch").iterdir()) == sorted([other, scratch])


def test_a_note_on_a_data_set_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any, show: Callable[[Dataset], None]) -> Mock:
        show(Dataset("function-train-cfb9a32b84ca", [], left_out=21, repeated=11, contradicting=3))
        return Mock()

    monkeypatch.setattr("services.cli.local_run.prepare_run", prepare)
    monkeypatch.setattr("services.cli.local_run.BufferClient", MagicMock())
    printed = io.StringIO()
    console = plain_console(file=printed, width=80)
    run = LocalRun(load_config(None, ["name=words"]), Mock(), tmp_path, tmp_path, console)
    create_run(run, tmp_path)
    (line,) = printed.getvalue().splitlines()
    assert line.endswith("(3 of them with another answer)")


@pytest.mark.parametrize("own", [True, False])
def test_a_run_names_bapo_stack_up_only_if_the_services_end_with_it(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.commands.run.explain_run", lambda *_: [])
    printed = io.StringIO()
    endpoints = Mock(pid=os.getpid() if own else os.getppid())
    config, console = load_config(None, ["name=words"]), plain_console(file=printed)
    run = LocalRun(config, endpoints, tmp_path, tmp_path, console)
    print_results(console, run, Mock(sets=[]))
    assert ("`bapo stack up`" in printed.getvalue()) == own
    assert "`bapo prompts words`, or the dashboard" in printed.getvalue()


def test_a_new_name_is_that_of_no_run_and_of_no_report(tmp_path: Path) -> None:
    client = Mock()
    client.runs.return_value = [Mock()]
    client.runs.return_value[0].name = "countdown"
    assert next_free_name(client, "countdown", tmp_path / "none") == "countdown-2"
    (tmp_path / "countdown-2").mkdir()
    assert next_free_name(client, "countdown", tmp_path) == "countdown-3"
    assert next_free_name(client, "geometry", tmp_path) == "geometry"


@pytest.mark.parametrize(("with_token", "tail"), [(True, "/#token=t0ken"), (False, "/")])
def test_the_link_to_the_dashboard_has_the_token_where_that_is_asked_for(
    with_token: bool, tail: str, tmp_path: Path
) -> None:
    endpoints = Mock(buffer_url="http://127.0.0.1:8700", token="t0ken")
    first, *others = format_addresses(endpoints, tmp_path, with_token=with_token).splitlines()
    assert first == f"dashboard  http://127.0.0.1:8700{tail}"
    assert "t0ken" not in "".join(others)


def test_what_a_killed_process_wrote_last_is_not_the_reason(tmp_path: Path) -> None:
    program = "import os, signal; print('step committed', flush=True); os.kill(os.getpid(), 9)"
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("trainer", [sys.executable, "-c", program])
        with pytest.raises(ProcessFailed) as failed:
            supervisor.wait_until(lambda: False, "nothing", seconds=30)
    assert str(failed.value) == (
        f"trainer was killed by SIGKILL: by a person, or for lack of memory (log: {tmp_path}/"
        "trainer.log)"
    )


@pytest.mark.parametrize(
    ("rollout", "share"),
    [
        ({"engine": "transformers", "replicas": 2}, 0.0),
        ({"engine": "vllm"}, 0.9),
        ({"engine": {"kind": "vllm", "args": ["--gpu-memory-utilization", "0.25"]}}, 0.25),
        (
            {"engine": {"kind": "vllm", "args": ["--gpu-memory-utilization=0.3"]}, "replicas": 2},
            0.6,
        ),
        ({"engine": "vllm", "replicas": 3}, 1.0),
    ],
)
def test_the_trainer_leaves_memory_of_the_gpu_to_vllm(
    rollout: dict[str, Any], share: float
) -> None:
    """vLLM starts after the trainer has planned with what is free."""
    assert engine_share(config_from({"rollout": rollout}).rollout) == pytest.approx(share)
