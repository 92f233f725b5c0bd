"""Suggests what a misspelt name was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, prefix: str = "") -> str:
    """Returns a question that names those of `known` that are like `name`, or an empty text.

    It follows a message of the error, and begins with a semicolon. most: how many are named.
    prefix: stands before each name.
    """
    close = [prefix + match for match in get_close_matches(name, list(known), n=most)]
    return f"; did you mean {' or '.join(close)}?" if close else ""
