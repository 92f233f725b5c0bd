"""Threads and processes that open a file exclusively take turns, though each removes its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.files import open_exclusively


@pytest.mark.parametrize(
    "remove",
    [Path.unlink, lambda path: path.rename(path.with_name("whole"))],
    ids=["deleted", "renamed"],
)
def test_threads_take_turns(tmp_path: Path, remove: Callable[[Path], object]) -> None:
    path = tmp_path / "partial"

    def append_and_remove(_: int) -> int:
        with open_exclusively(path) as file:
            # Another thread would read this byte, or append one beside it.
            assert file.read() == b""
            file.write(b"1")
            file.flush()
            size = os.path.getsize(path)
            remove(path)
        return size

    with ThreadPoolExecutor(8) as pool:
        # 400 turns met the removal between two looks at the path in one of five trials.
        assert set(pool.map(append_and_remove, range(4000))) == {1}


def test_a_file_that_was_left_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    for expected in (b"", b"1", b"11"):
        with open_exclusively(path) as file:
            assert file.read() == expected
            file.write(b"1")
