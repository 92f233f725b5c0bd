"""Reads JSON files of model directories, whose content nobody has checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo_core.errors import BapoError


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is no such file.

    Raises `BapoError` for a file that has no JSON object.
    """
    try:
        content = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError) as error:
        raise BapoError(
            f"{file}: not JSON ({error}); the directory is damaged, publish it again"
        ) from error
    if not isinstance(content, dict):
        raise BapoError(
            f"{file}: has a JSON {type(content).__name__} in place of an object; the directory is "
            "damaged, publish it again"
        )
    return content


def section_of(content: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    """Returns the object of this name in the content of a file; empty if there is none.

    Raises `BapoError` if something else has the name.
    """
    section = content.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise BapoError(
            f"{file}: {name} is a JSON {type(section).__name__} in place of an object; the "
            "directory is damaged, publish it again"
        )
    return section
