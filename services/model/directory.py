"""Writes model directories."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_directory(directory: Path) -> Iterator[Path]:
    """Yields an empty directory, which replaces `directory` unless the block raises."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
