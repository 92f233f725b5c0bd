"""Tables of the command line are whole, also where there is no terminal."""

from __future__ import annotations

import pytest

from services.cli.tables import show


def test_a_pipe_gets_whole_values(capsys: pytest.CaptureFixture[str]) -> None:
    values = [[str(digit) * 30 for digit in range(6)]]
    show([], [f"column {number}" for number in range(6)], values, as_json=False)
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == values[0]
