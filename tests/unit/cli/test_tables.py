"""Tables of the command line are whole, also where there is no terminal."""

from __future__ import annotations

import pytest

from services.cli.tables import show, take


def test_a_pipe_gets_whole_values(capsys: pytest.CaptureFixture[str]) -> None:
    values = [[str(digit) * 30 for digit in range(6)]]
    show([], [f"column {number}" for number in range(6)], values, as_json=False)
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == values[0]


def test_a_list_that_is_cut_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert take(range(3), 3) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert take(range(4), 3) == [0, 1, 2]
    assert capsys.readouterr().err == "the first 3; --limit shows more\n"
