"""Environment variables of the local stack."""

from __future__ import annotations

from pathlib import Path

from bapo_core.errors import BapoError
from services.common.settings import Settings


class StackSettings(Settings):
    """Settings of the local stack (`bapo stack`, and every command that uses it)."""

    home: Path = Path(".bapo")
    """Directory of the local stack: database, objects, models, logs and scratch files."""


def default_home() -> Path:
    """Returns the absolute directory of the local stack, `BAPO_HOME`.

    Raises `BapoError` for a path that the object store cannot use.
    """
    home = StackSettings.load().home.expanduser().resolve()
    if "," in str(home):
        raise BapoError(
            f"BAPO_HOME is {home}, and SeaweedFS takes a comma for the end of a directory's path; "
            "set BAPO_HOME to a directory without one"
        )
    return home
