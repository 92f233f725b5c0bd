"""Suggests what a misspelt name was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, prefix: str = "") -> str:
    """Returns a question that names those of `known` that are like `name`, or an empty text.

    It follows a message of the error, and begins with a semicolon. most: how many are named.
    prefix: stands before each name.
    """
    names = list(known)
    # Letters in another order are the likeliest slip, which the ratio of difflib ranks low.
    swapped = [other for other in names if sorted(other) == sorted(name)]
    near = [other for other in get_close_matches(name, names, n=most) if other not in swapped]
    close = [prefix + match for match in (*swapped, *near)][:most]
    return f"; did you mean {' or '.join(close)}?" if close else ""
