"""Makes text from elsewhere safe to print on a terminal."""

from __future__ import annotations

import re
import unicodedata

_PERHAPS_NOT_PRINTABLE = re.compile(r"[^\n\t -~]")


def escape_controls(text: str) -> str:
    """Returns `text` with its control characters escaped, but for line feeds and tabs.

    Terminals obey sequences that begin with an escape character: they change the title, the
    clipboard or lines that were printed before. Characters that change the direction of text, or
    have no width, hide what a text says. Spaces of every width are kept: tables of bapo have
    no-break spaces, and Chinese and Japanese text has ideographic ones.
    """
    return _PERHAPS_NOT_PRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    is_kept = character.isprintable() or unicodedata.category(character) == "Zs"
    return character if is_kept else ascii(character)[1:-1]
