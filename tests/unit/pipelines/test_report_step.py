"""The report of a pipeline waits for something to report."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pipelines import steps


class Reached(Exception):
    """The history was read."""


def test_the_report_waits_for_the_first_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("services.report.summary.read_history", Mock(side_effect=Reached))
    evaluations = Mock(side_effect=[[], [], ["an evaluation"]])
    with pytest.raises(Reached):
        steps.report(Mock(buffer=Mock(evaluations=evaluations, replicas=Mock(return_value=[]))))
    assert evaluations.call_count == 3
