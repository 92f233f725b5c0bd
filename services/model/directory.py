"""Refuses to write into directories that hold files."""

from __future__ import annotations

from pathlib import Path

from bapo_core.errors import BapoError


def refuse_files(directory: Path) -> None:
    """Raises `BapoError` unless `directory` is empty, or does not exist."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BapoError(f"{directory} is not empty; name a new directory")
