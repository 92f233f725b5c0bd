"""Tables of the command line are whole, also where there is no terminal."""

from __future__ import annotations

import pytest

from services.cli.tables import show, take, take_last


def test_a_pipe_gets_whole_values(capsys: pytest.CaptureFixture[str]) -> None:
    values = [[str(digit) * 30 for digit in range(6)]]
    show([], [f"column {number}" for number in range(6)], values, as_json=False, empty="none")
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == values[0]


def test_brackets_in_values_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    values = ["sum[odd]", "algebra[/x]", "[bold]"]
    show([], ["a", "b", "c"], [values], as_json=False, empty="none")
    assert capsys.readouterr().out.splitlines()[1].split() == values


def test_a_list_that_is_cut_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert take(range(3), 3) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert take(range(4), 3) == [0, 1, 2]
    assert capsys.readouterr().err == "the first 3; --limit shows more\n"
    assert take_last(range(3), 3) == [0, 1, 2]
    assert take_last(range(3), 0) == []
    assert capsys.readouterr().err == "the last 0; --limit shows more\n"
    assert take_last(range(4), 3) == [1, 2, 3]
    assert capsys.readouterr().err == "the last 3; --limit shows more\n"


def test_a_list_without_rows_says_why_but_not_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show([], ["run"], [], as_json=False, empty="there is no run yet")
    assert capsys.readouterr() == ("", "there is no run yet\n")
    show([], ["run"], [], as_json=True, empty="there is no run yet")
    assert capsys.readouterr() == ("[]\n", "")
