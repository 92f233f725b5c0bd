"""The console to which commands print."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Returns a console that prints text as it is.

    Rich reads brackets as markup unless told otherwise. Errors of engines, uids of prompts and
    labels have brackets of their own, which would be lost or raise `MarkupError`.
    """
    return Console(markup=False, highlight=False, **options)
