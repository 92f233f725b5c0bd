"""Draws an experiment in the paper's layout, beside the paper's numbers, on one HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from bapo_core.types import Source
from services.report import charts
from services.report.html import SOURCE_LABELS, figure, page
from services.reproduction.declarations import Declaration, Panel, PaperNumbers, Size
from services.reproduction.states import (
    LabelledRecord,
    State,
    curve_of,
    describe_result,
    describe_state,
)


def write_page(
    name: str,
    declaration: Declaration,
    size: Size,
    results: Sequence[LabelledRecord],
    state: State,
    path: Path,
) -> None:
    """Writes the page of an experiment; results: of the runs that have any."""
    runs = f"{len(results)} of {state.runs} runs" if state.done < state.runs else ""
    body = [
        f"<h1>{html.escape(f'{name}: {declaration.title}')}</h1>",
        f"<p class='lead'>{html.escape(declaration.claim)}</p>",
        f"<p><b>{html.escape(describe_state(state))}</b> at {size} size. {runs} "
        f"{html.escape(declaration.note)}</p>",
        *(
            f"<p class='soft'>{'<br>'.join(map(html.escape, describe_result(result)))}</p>"
            for result in state.results
        ),
        f"<div class='charts'>{''.join(_figures(declaration, results))}"
        f"{_measured(results)}{_paper(declaration)}</div>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(f"bapo reproduce {name}", "".join(body)), encoding="utf-8")


def _figures(declaration: Declaration, results: Sequence[LabelledRecord]) -> Iterator[str]:
    for panel in declaration.panels:
        drawn = [each for each in results if not panel.variants or each.label in panel.variants]
        if drawn:
            yield figure(panel.title, _caption(panel, drawn), _draw(panel, drawn))


def _caption(panel: Panel, drawn: Sequence[LabelledRecord]) -> str:
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(each.record.seed for each in drawn))
    if panel.kind == "bins":
        return (
            "Held-out prompts by correct responses, before and after training; those with none at "
            f"first are marked. Seeds {seeds} together."
        )
    if panel.kind == "sources":
        return f"Share of the groups of a batch, by source; mean over seeds {seeds}."
    text = f"Means over seeds {seeds}; bands span the minimum to the maximum."
    missing = [label for label in _labels(drawn) if label not in _curves(panel, drawn)]
    if missing:
        text += f" No step of these has a value: {'; '.join(missing)}."
    return text


def _draw(panel: Panel, drawn: Sequence[LabelledRecord]) -> str:
    if panel.kind == "bins":
        matrices = [each.record.migration for each in drawn]
        total = [
            [sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)
        ]
        return charts.migrated_bins(total)
    if panel.kind == "sources":
        return _draw_sources(drawn)
    curves = _curves(panel, drawn)
    if not curves:
        return ""
    x = "training step" if panel.metric is not None else panel.over
    return charts.bands(curves, x=x, y=panel.metric or "held-out accuracy")


def _curves(
    panel: Panel, drawn: Sequence[LabelledRecord]
) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Returns the points (x, y) of each run that has any, by the label of its variant.

    A run has no values of a metric that its method never measures, such as the divergence of
    groups of earlier policies where all groups are of the current one.
    """
    curves: dict[str, list[tuple[list[float], list[float]]]] = {}
    for each in drawn:
        if panel.metric is None:
            curve = curve_of(each.record, panel.over)
            points = (list(curve.costs), list(curve.values))
        else:
            values = each.record.steps.get(panel.metric, ())
            if not values:
                continue
            points = (list(map(float, range(1, len(values) + 1))), list(charts.smoothed(values)))
        curves.setdefault(each.label, []).append(points)
    return curves


def _labels(results: Sequence[LabelledRecord]) -> list[str]:
    return list(dict.fromkeys(each.label for each in results))


def _draw_sources(drawn: Sequence[LabelledRecord]) -> str:
    length = min(len(each.record.steps["groups in the batch"]) for each in drawn)
    shares: dict[str, list[float]] = {}
    totals = [
        sum(each.record.steps["groups in the batch"][step] for each in drawn) or 1.0
        for step in range(length)
    ]
    for source in Source:
        counts = [each.record.steps.get(source.value, (0.0,) * length) for each in drawn]
        shares[SOURCE_LABELS[source]] = [
            sum(series[step] for series in counts) / totals[step] for step in range(length)
        ]
    steps = [float(step) for step in range(1, length + 1)]
    return charts.stacked(steps, shares, y="share of the batch")


def _measured(results: Sequence[LabelledRecord]) -> str:
    """Returns the table of the last evaluations in percent, as the paper prints its results."""
    columns = list(dict.fromkeys(name for each in results for name in each.record.sets))
    rows: dict[str, tuple[float | None, ...]] = {}
    for label in _labels(results):
        sets = [each.record.sets for each in results if each.label == label]
        rows[label] = tuple(
            round(100 * mean(each[name] for each in sets), 2)
            if all(name in each for each in sets)
            else None
            for name in columns
        )
    caption = "Percent of the held-out prompts of each set, last evaluation, mean over the seeds."
    numbers = PaperNumbers(columns=tuple(columns), rows=rows)
    return _table("Measured", numbers, caption) if columns else ""


def _paper(declaration: Declaration) -> str:
    numbers = declaration.numbers
    if numbers is None:
        return f"<p class='soft'>The paper's numbers: {html.escape(declaration.source)}</p>"
    return _table("The paper's numbers", numbers, f"{numbers.note} {declaration.source}".strip())


def _table(title: str, numbers: PaperNumbers, caption: str) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in numbers.columns)
    rows = "".join(
        f"<tr><td>{html.escape(label)}</td>"
        + "".join(f"<td>{'' if value is None else f'{value:g}'}</td>" for value in row)
        + "</tr>"
        for label, row in numbers.rows.items()
    )
    return (
        f"<figure class=wide><h2>{html.escape(title)}</h2>"
        f"<figcaption>{html.escape(caption)}</figcaption>"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></figure>"
    )
