"""Draws the charts of a report as inline SVG, in colours for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#7a8290"
SERIES = ("#3b7dd8", "#e0743c", "#2f9e6e", "#b35fc4", "#c9a227", "#5aa9c7")
"""Colours of series, which colour-blind readers can distinguish."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.18,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    # Ids are not random, so that the same run always gives the same report.
    "svg.hashsalt": "bapo",
}


class Chart:
    """Axes to draw on; `svg` holds the chart once it is finished."""

    def __init__(self, figure: Figure, axes: Axes) -> None:
        self.figure, self.axes = figure, axes
        self.svg = ""


@contextmanager
def chart(
    *, x: str = "training step", y: str = "", wide: bool = False, tall: bool = False
) -> Iterator[Chart]:
    """Yields a chart to draw on, whose `svg` is set after the block."""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11 if wide else 5.6, 4.6 if tall else 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        drawn = Chart(figure, axes)
        yield drawn
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            columns = min(4, len(handles))
            figure.legend(loc="outside upper left", ncols=columns, fontsize=9)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        drawn.svg = text[text.index("<svg") :]


def smoothed(values: Sequence[float], window: int = 15) -> np.ndarray[Any, Any]:
    """Returns the centred moving mean of the values that are not NaN, which stay NaN."""
    known = ~np.isnan(values)
    kernel = np.ones(min(window, len(values)))
    weights = np.convolve(known, kernel, mode="same")
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    result: np.ndarray[Any, Any] = np.where(known, sums / np.maximum(weights, 1), np.nan)
    return result


def _legend(name: str) -> str:
    """Returns a name as matplotlib shows it, which leaves out names with an underscore in front."""
    return f" {name}" if name.startswith("_") else name.replace("$", r"\$")


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    y: str = "",
    raw: bool = False,
    marks: Sequence[float] = (),
) -> str:
    """Draws one line for each series, with gaps where values are NaN.

    raw: draws the values faintly and their moving mean over them. marks: where dashed lines stand.
    """
    with chart(y=y) as drawn:
        for mark in marks:
            drawn.axes.axvline(mark, color=INK, linestyle=(0, (2, 3)), linewidth=1)
        for (name, values), colour in zip(series.items(), SERIES, strict=False):
            if raw:
                drawn.axes.plot(x, values, color=colour, alpha=0.25, linewidth=0.8)
                drawn.axes.plot(
                    x, smoothed(values), color=colour, linewidth=1.8, label=_legend(name)
                )
            else:
                marker = "o" if len(x) < 40 else None
                drawn.axes.plot(
                    x,
                    values,
                    color=colour,
                    linewidth=1.8,
                    marker=marker,
                    markersize=3.5,
                    label=_legend(name),
                )
    return drawn.svg


def stacked(
    x: Sequence[float], series: Mapping[str, Sequence[float]], *, y: str, limit: float | None = None
) -> str:
    """Draws stacked areas, and a dashed line at `limit`."""
    with chart(y=y) as drawn:
        drawn.axes.stackplot(
            x, list(series.values()), labels=list(series), colors=SERIES, alpha=0.85, linewidth=0
        )
        if limit is not None:
            drawn.axes.axhline(limit, color=INK, linestyle="--", linewidth=1)
        drawn.axes.set_xlim(x[0], max(x[-1], x[0] + 1))
    return drawn.svg


def bins_over_time(x: Sequence[float], bins: Sequence[Sequence[int]]) -> str:
    """Draws the share of prompts with k of G correct responses, from dark (0) to light (G)."""
    shares = np.array(bins, dtype=float).T
    shares /= shares.sum(axis=0, keepdims=True)
    colours = mpl.colormaps["viridis"](np.linspace(0.02, 0.95, len(shares)))
    with chart(y="share of prompts", tall=True) as drawn:
        top = len(shares) - 1
        labels = [f"{k} of {top}" for k in range(top + 1)]
        drawn.axes.stackplot(x, shares, labels=labels, colors=colours, linewidth=0)
        drawn.axes.set_xlim(x[0], max(x[-1], x[0] + 1))
        drawn.axes.set_ylim(0, 1)
    return drawn.svg


def replay_window(
    x: Sequence[float], c2: Sequence[float], c3: Sequence[float], r_tot: Sequence[float]
) -> str:
    """Draws the replay window [c2, c3] and the accuracy r_tot that moves it (Eq. 8)."""
    with chart(y="accuracy of a group") as drawn:
        drawn.axes.fill_between(
            x, c2, c3, color=SERIES[2], alpha=0.35, label="replay window [c2, c3]"
        )
        drawn.axes.plot(x, r_tot, color=SERIES[0], linewidth=1, label="r_tot")
        drawn.axes.set_ylim(0, 1)
    return drawn.svg


def series_colours(count: int) -> list[Any]:
    """Returns a colour for each of `count` series."""
    if count <= len(SERIES):
        return list(SERIES[:count])
    return list(mpl.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


Curves: TypeAlias = Mapping[str, Sequence[tuple[list[float], list[float]]]]
"""(x values, y values) of every curve, by name."""


def bands(curves: Curves, *, x: str, y: str) -> str:
    """Draws the mean of each name's curves, in a band from their minimum to their maximum.

    Curves of a name are drawn as far as the shortest of them goes.
    """
    with chart(x=x, y=y, tall=True) as drawn:
        for (name, runs), colour in zip(curves.items(), series_colours(len(curves)), strict=True):
            # Seeds differ in the number of rollouts, so their curves are resampled at the same x.
            end = min(xs[-1] for xs, _ in runs)
            longest = max(runs, key=lambda curve: len(curve[0]))[0]
            grid = np.array([*(x for x in longest if x < end), end])
            values = np.array([np.interp(grid, xs, ys) for xs, ys in runs])
            drawn.axes.fill_between(
                grid, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.18, linewidth=0
            )
            drawn.axes.plot(
                grid, values.mean(axis=0), color=colour, linewidth=2, label=_legend(name)
            )
    return drawn.svg


def migration(matrix: Sequence[Sequence[int]], before: str, after: str) -> str:
    """Draws the number of prompts that moved from one bin (row) to another (column)."""
    values = np.array(matrix)
    with chart(x=f"k correct, {after}", y=f"k correct, {before}", tall=True) as drawn:
        drawn.axes.grid(False)
        drawn.axes.imshow(np.sqrt(values), cmap="Blues", origin="lower", aspect="auto")
        brightest = np.sqrt(values.max()) if values.size else 0.0
        for row, column in zip(*np.nonzero(values), strict=True):
            count = int(values[row, column])
            dark = np.sqrt(count) > 0.6 * brightest
            drawn.axes.text(
                column, row, str(count), ha="center", va="center", fontsize=9,
                color="white" if dark else "#1d2733",
            )  # fmt: skip
        drawn.axes.set_yticks(range(len(values)))
        drawn.axes.set_xticks(range(len(values)))
    return drawn.svg


def migrated_bins(matrix: Sequence[Sequence[int]]) -> str:
    """Draws the number of prompts with k correct responses, before and after training.

    matrix: prompts by their bin before (row) and after (column). Each bar after is divided by the
    bins before; the prompts with no correct response before have a colour of their own.
    """
    values = np.array(matrix)
    size = len(values)
    colours = [SERIES[1], *mpl.colormaps["Blues"](np.linspace(0.3, 0.9, size - 1))]
    with chart(x="k correct", y="prompts", tall=True) as drawn:
        positions = np.arange(size)
        drawn.axes.bar(
            positions - 0.2, values.sum(axis=1), 0.36, color=colours, edgecolor=INK, linewidth=0.4
        )
        bottom = np.zeros(size)
        for row, colour in zip(values, colours, strict=True):
            drawn.axes.bar(positions + 0.2, row, 0.36, bottom, color=colour, linewidth=0)
            bottom += row
        drawn.axes.bar(
            [0], [0], color=SERIES[1], label="none correct before (left: before, right: after)"
        )
        drawn.axes.set_xticks(positions)
        drawn.axes.grid(False, axis="x")
    return drawn.svg


SPAN_KINDS = {
    "training": ("update", "proximal", "read", "commit"),
    "generating": ("fresh", "generate"),
    "evaluation": ("evaluation",),
    "re-evaluation": ("reevaluation",),
    "weights": ("publish", "fetch", "load"),
    "scoring, delivery": ("verify", "deliver"),
    "checkpoint": ("checkpoint",),
    "waiting": ("wait", "await weights", "drain"),
}
"""Names of the spans of each kind; a kind has one colour."""
BAR_HEIGHT = 0.8


def timeline(
    lanes: Mapping[str, Sequence[tuple[str, float, float]]], edges: Sequence[float]
) -> str:
    """Draws a row of bars for each lane, and dashed lines at `edges`.

    lanes: (name of the span, start, end) in seconds, by the lane's name.
    """
    with chart(x="seconds", wide=True) as drawn:
        axes = drawn.axes
        colours = dict(zip(SPAN_KINDS, (*SERIES, "#a8554a", "#b9bec7"), strict=True))
        for kind, names in SPAN_KINDS.items():
            bars = [
                (row, start, end - start)
                for row, spans in enumerate(lanes.values())
                for name, start, end in spans
                if name in names
            ]
            if bars:
                rows, starts, lengths = zip(*bars, strict=True)
                axes.barh(
                    rows, lengths, BAR_HEIGHT, starts, color=colours[kind], label=kind, linewidth=0
                )
        for edge in edges:
            axes.axvline(edge, color=INK, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.01)
    return drawn.svg


def stacked_bars(labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, x: str) -> str:
    """Draws a horizontal bar for each label, the first on top, which is stacked of parts.

    parts: a value for each label, by the name of the part; a single part needs no name.
    """
    with chart(x=x) as drawn:
        drawn.figure.set_figheight(1.0 + 0.24 * len(labels))
        ends = np.zeros(len(labels))
        for (name, values), colour in zip(parts.items(), SERIES, strict=False):
            drawn.axes.barh(
                range(len(labels)), values, BAR_HEIGHT, ends, color=colour, label=name, linewidth=0
            )
            ends += np.array(values)
        if len(parts) == 1:
            for row, end in enumerate(ends):
                drawn.axes.text(end, row, f" {end:.2f}", va="center", fontsize=9)
        drawn.axes.set_yticks(range(len(labels)), [_legend(label) for label in labels])
        drawn.axes.invert_yaxis()
        drawn.axes.grid(False, axis="y")
        drawn.axes.margins(x=0.12 if len(parts) == 1 else 0.01, y=0.01)
    return drawn.svg


def bars(values: Mapping[str, float], *, x: str) -> str:
    """Draws horizontal bars, the longest on top."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    with chart(x=x) as drawn:
        drawn.axes.barh([name for name, _ in ordered], [v for _, v in ordered], color=SERIES[0])
        for position, (_, value) in enumerate(ordered):
            drawn.axes.text(value, position, f" {value:.1f}", va="center", fontsize=9)
        drawn.axes.grid(False, axis="y")
        drawn.axes.margins(x=0.12)
    return drawn.svg
