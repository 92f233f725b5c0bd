"""Files that hold secrets are private, and are never seen half written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from services.common.files import write_private


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("of before")
    path.chmod(0o644)
    write_private(path, "secret")
    assert path.read_text() == "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_another_reader_sees_the_whole_file_or_the_one_of_before(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    texts = ["a" * 2**20, "b" * 2**20]
    write_private(path, texts[0])
    ended = threading.Event()

    def write() -> None:
        try:
            for count in range(200):
                write_private(path, texts[count % 2])
        finally:
            ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        assert path.read_text() in texts
    thread.join()


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    write_private(path, "of before")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "\ud800")
    assert path.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [path]
