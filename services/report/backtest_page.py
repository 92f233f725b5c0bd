"""Writes the page of a back-test: its first line, tables, pictures and the meaning of columns."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.report import charts
from services.report.backtest_table import CAVEAT, SAMPLERS, RunBackTest, Table, tables_of
from services.report.html import figure, page


def write_backtest(tests: Sequence[RunBackTest], directory: Path) -> Path:
    """Writes `backtest.html` and `backtest.json` to `directory`; returns the page's path.

    tests: of several runs by the same rules.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = {
        "caveat": CAVEAT,
        "tables": [table.as_json() for table in tables_of(tests)],
        "runs": [test.as_json() for test in tests],
    }
    (directory / "backtest.json").write_text(json.dumps(data, indent=1) + "\n")
    path = directory / "backtest.html"
    path.write_text(_page(tests), encoding="utf-8")
    return path


def _page(tests: Sequence[RunBackTest]) -> str:
    names = ", ".join(test.run for test in tests)
    means = ", and means over the runs" if len(tests) > 1 else ""
    lead = (
        f"Rules applied to the groups that {names} recorded up to step "
        f"{max(test.last_step for test in tests)}; counts are per step{means}."
    )
    notes = [warning for test in tests for warning in test.warnings()]
    body = [
        f'<p class="lead"><b>{html.escape(CAVEAT)}</b></p>',
        f"<h1>Back-test of {html.escape(names)}</h1>",
        f'<p class="lead">{html.escape(lead)}</p>',
        *(f'<p class="lead">Note: {html.escape(note)}.</p>' for note in notes),
    ]
    tables = tables_of(tests)
    for table in tables:
        figures = _sampler_figures if table.title == SAMPLERS else _data_figures
        body += [_table(table), f'<div class="charts">{"".join(figures(table))}</div><br>']
    body += map(_meanings, tables)
    return page(f"{names}: bapo back-test", "".join(body))


def _data_figures(table: Table) -> Iterator[str]:
    yield figure(
        "Groups in a batch",
        "By source, on average over the steps.",
        charts.stacked_bars(
            list(table.rows),
            {name: _column(table, name) for name in ("fresh", "re-evaluated", "replayed")},
            x="groups",
        ),
    )
    yield figure(
        "Signal of a batch",
        "Sum of μ (1 − μ) over a batch, on average over the steps.",
        charts.stacked_bars(list(table.rows), {"": _column(table, "signal")}, x="signal"),
    )


def _sampler_figures(table: Table) -> Iterator[str]:
    rolled_out = _column(table, "rolled out")
    missing = [
        drawn - known for drawn, known in zip(_column(table, "drawn"), rolled_out, strict=True)
    ]
    yield figure(
        "Prompts that a sampler draws in a step",
        "Results are recorded for prompts that the run rolled out at the same step alone.",
        charts.stacked_bars(
            list(table.rows), {"rolled out": rolled_out, "estimated": missing}, x="prompts"
        ),
    )
    yield figure(
        "Signal of the drawn prompts",
        "Sum of μ (1 − μ) over the prompts of a step, recorded or estimated.",
        charts.stacked_bars(list(table.rows), {"": _column(table, "signal")}, x="signal"),
    )


def _column(table: Table, heading: str) -> list[float]:
    return [row[heading] or 0.0 for row in table.values.values()]


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings)
    rows = "".join(
        f"<tr><td>{html.escape(label)}</td>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells in table.rows.items()
    )
    note = f"<figcaption>{html.escape(table.note)}</figcaption>" if table.note else ""
    return (
        f"<figure class=scrolls><h2>{html.escape(table.title)}</h2>{note}"
        f"<table><thead><tr><th>rules</th>{head}</tr></thead><tbody>{rows}</tbody></table></figure>"
    )


def _meanings(table: Table) -> str:
    items = "".join(
        f"<dt><b>{html.escape(heading)}</b></dt><dd>{html.escape(meaning)}</dd>"
        for heading, meaning in zip(table.headings, table.meanings, strict=True)
    )
    return (
        f"<details><summary>Meaning of the columns: {html.escape(table.title)}</summary>"
        f"<dl>{items}</dl></details>"
    )
