"""Text from elsewhere is printed so that a terminal obeys none of it."""

from __future__ import annotations

import pytest

from services.common.printable import escape_controls


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("a\u202eb", r"a\u202eb"),
        ("a\u200bb\u2028", r"a\u200bb\u2028"),
    ],
)
def test_controls_directions_and_characters_without_width_are_escaped(
    text: str, printed: str
) -> None:
    assert escape_controls(text) == printed


def test_letters_lines_and_spaces_of_every_width_are_kept() -> None:
    text = "0.191\N{NO-BREAK SPACE}[0.161–0.220]\n\t答案\N{IDEOGRAPHIC SPACE}42 é"
    assert escape_controls(text) == text
