"""The report of a run draws what was measured, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from services.buffer.api.wire import ForkOrigin, RecordedChange
from services.report import charts
from services.report.html import write_report
from services.report.summary import summarise
from tests.unit.report.test_comparison import result


def test_means_leave_out_steps_without_a_value() -> None:
    nan = np.nan
    assert charts.smoothed([1.0, nan, 3.0, 5.0], 3).tolist() == pytest.approx(
        [1.0, nan, 4.0, 4.0], nan_ok=True
    )
    assert charts.smoothed([1.0, 2.0, 3.0], 1).tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(charts.smoothed([nan, nan])).all()


def test_a_metric_that_no_step_has_is_not_drawn(tmp_path: Path) -> None:
    history = result("run", 1, [0.0, 0.5, 0.5], 10).history
    counts = {"fresh": 8, "reevaluated": 0, "replayed": 0}
    first, *others = (step.model_copy(update={"counts": counts}) for step in history.steps)
    metrics = {
        "entropy": 0.5,
        "responses/cut_off": 0.75,
        "staleness_mean": 1.0,
        "staleness_max": 2.0,
    }
    history = replace(history, steps=[first.model_copy(update={"metrics": metrics}), *others])
    write_report(history, summarise(history), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Entropy of the policy on the trained tokens" in page
    assert "Share of the sampled responses that reached rollout.max_response_tokens" in page
    assert "Theorem 3.2" not in page
    assert "mismatch KL" not in page


def test_changes_of_the_configuration_are_in_the_summary_and_the_report(tmp_path: Path) -> None:
    history = result("run", 1, [0.0, 0.5, 0.5], 10).history
    change = RecordedChange(
        first_step=2,
        old={"optimizer.learning_rate": 1e-4},
        new={"optimizer.learning_rate": 1e-5},
        attempt=3,
        by="<alice>",
        at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        digest="0" * 64,
    )
    counts = {"fresh": 8, "reevaluated": 0, "replayed": 0}
    steps = [step.model_copy(update={"counts": counts}) for step in history.steps]
    history = replace(history, steps=steps)
    pages = []
    for changes in ([], [change]):
        state = history.state.model_copy(update={"changes": changes})
        changed = replace(history, state=state)
        summary = summarise(changed)
        assert [each["first_step"] for each in summary["changes"]] == [2] * len(changes)
        write_report(changed, summary, tmp_path / "report.html")
        pages.append((tmp_path / "report.html").read_text())
    assert "Changes of the configuration" not in pages[0]
    row = "".join(
        f"<td>{cell}</td>"
        for cell in (2, "optimizer.learning_rate", 0.0001, 1e-05, 3, "2026-01-02 03:04:05 UTC")
    )
    assert row in pages[1]
    dashed = [page.count("stroke-dasharray") for page in pages]
    assert dashed[1] > dashed[0], "charts mark the step"


def test_the_report_of_a_fork_names_its_origin_and_the_keys_that_begin_or_end(
    tmp_path: Path,
) -> None:
    history = result("run", 1, [0.0, 0.5, 0.5], 10).history
    change = RecordedChange(
        first_step=2,
        old={"name": "parent", "replay.window.r_tot": "<batch>"},
        new={"name": "run", **{f"options.key{number:02d}": number for number in range(12)}},
        attempt=0,
        by="alice",
        at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        digest="0" * 64,
    )
    origin = ForkOrigin(run="parent", step=1, checkpoint=1, rollouts_until=2)
    state = history.state.model_copy(update={"changes": [change], "forked_from": origin})
    counts = {"fresh": 8, "reevaluated": 0, "replayed": 0}
    steps = [step.model_copy(update={"counts": counts}) for step in history.steps]
    fork = replace(history, state=state, steps=steps)
    summary = summarise(fork)
    assert summary["forked_from"] == origin.model_dump()
    assert summarise(history)["forked_from"] is None
    write_report(fork, summary, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "fork of parent at step 1, on its rollouts to step 2: " in page
    assert "<td>options.key00</td><td>unset</td><td>0</td>" in page
    assert "<td>replay.window.r_tot</td><td>&lt;batch&gt;</td><td>unset</td>" in page
    assert "<td>name</td>" not in page
    assert page.index("options.key09") < page.index("<summary>3 more</summary>")
    assert page.index("<summary>3 more</summary>") < page.index("options.key10")
