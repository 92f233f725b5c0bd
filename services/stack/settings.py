"""Environment variables of the local stack."""

from __future__ import annotations

from pathlib import Path

from services.common.settings import Settings


class StackSettings(Settings):
    """Settings of the local stack (`bapo stack`, and every command that uses it)."""

    home: Path = Path(".bapo")
    """Directory of the local stack: database, objects, models, logs and scratch files."""


def default_home() -> Path:
    """Returns the absolute directory of the local stack, `BAPO_HOME`."""
    return StackSettings.load().home.resolve()
