"""Writes model directories, all files or none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.model.directory import refuse_files


@contextmanager
def write_directory(directory: Path) -> Iterator[Path]:
    """Yields an empty directory, which becomes `directory` unless the block raises.

    Raises `BapoError` if `directory` contains files, which it would have to delete.
    """
    directory = directory.resolve()
    refuse_files(directory)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
