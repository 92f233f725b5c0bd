"""The local stack starts after a power loss, with files of other versions and in unusual paths."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from bapo_core.errors import BapoError
from services.common.errors import ServiceError
from services.common.http import HttpClient
from services.stack.postgres import _remove_stale_pid
from services.stack.settings import default_home
from services.stack.stack import Endpoints, find_stack


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"buffer_url": "http://127.0.0.1:9"}'])
def test_an_unreadable_stack_file_without_a_stack_counts_as_none(text: str, home: Path) -> None:
    directory = home / "power-loss"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "stack.json").write_text(text)
    assert find_stack(directory) is None


def test_a_stack_of_a_newer_version_is_read(stack: Endpoints, home: Path) -> None:
    path = home / "stack.json"
    original = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(original), "of_a_newer_version": True}))
        assert find_stack(home) == stack
    finally:
        path.write_text(original)


def test_an_unreadable_stack_file_of_a_running_stack_names_its_process(
    stack: Endpoints, home: Path
) -> None:
    path = home / "stack.json"
    original = path.read_text()
    try:
        path.write_text("")
        with pytest.raises(BapoError, match=rf"while a stack runs; end process {stack.pid}"):
            find_stack(home)
    finally:
        path.write_text(original)


def test_the_process_id_of_a_postgres_that_has_ended_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "postmaster.pid"
    other = subprocess.Popen(["sleep", "60"])
    try:
        for text in (f"{other.pid}\n/data\n", "4194304999\n", ""):
            path.write_text(text)
            _remove_stale_pid(tmp_path)
            assert not path.exists()
    finally:
        other.kill()
        other.wait()


def test_the_process_id_of_a_running_postgres_stays(stack: Endpoints, home: Path) -> None:
    path = home / "postgres" / "postmaster.pid"
    before = path.read_text()
    _remove_stale_pid(home / "postgres")
    assert path.read_text() == before


def test_a_tilde_in_the_home_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOME", "~/runs")
    assert default_home() == Path(os.path.expanduser("~/runs")).resolve()


def test_a_comma_in_the_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOME", "/tmp/a,b")
    with pytest.raises(BapoError, match="set BAPO_HOME to a directory without one"):
        default_home()


@pytest.mark.parametrize(
    ("status", "expected"),
    [(413, "raise its limit to 64 MiB"), (401, r"answered with a page \(HTTP 401\)")],
)
def test_a_page_of_a_proxy_is_explained(status: int, expected: str) -> None:
    client = HttpClient("buffer service", "http://buffer", "a-token")
    page = httpx.Response(status, html="<html>nginx</html>")
    client._client = httpx.Client(
        transport=httpx.MockTransport(lambda _: page), base_url="http://buffer"
    )
    with pytest.raises(ServiceError, match=expected) as caught:
        client.call("POST", "/v1/datasets")
    assert "<html>" not in str(caught.value)
