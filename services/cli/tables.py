"""Prints answers of the service, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from services.cli.console import plain_console
from services.cli.echo import echo

Item = TypeVar("Item")
GAP = 2
"""Characters between two columns."""
PIPE_WIDTH = 1000
"""Characters of a line that another program or a file gets: none of a table's values is cut off."""


def show(
    answer: BaseModel | Sequence[BaseModel],
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    as_json: bool,
    empty: str,
) -> None:
    """Prints a table of `rows`, or the whole `answer` as JSON.

    empty: the line to print where there are no rows. It goes to standard error, as it is no row.
    """
    if as_json:
        print_json(answer)
        return
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        # A line break in a reason or a uid would begin a row of the table.
        table.add_row(*(" ".join(str(value).splitlines()) for value in row))
    if table.rows:
        table_console().print(table)
    else:
        echo(empty, err=True)


def take(items: Iterable[Item], limit: int) -> list[Item]:
    """Returns the first `limit` of the items; says on standard error if there are more."""
    taken = list(islice(items, limit + 1))
    if len(taken) > limit:
        echo(f"the first {limit}; --limit shows more", err=True)
    return taken[:limit]


def step_before_last(current_step: int, limit: int) -> int:
    """Returns the step after which the last `limit` steps follow, and one more for `take_last`."""
    return max(0, current_step - limit - 1)


def take_last(items: Sequence[Item], limit: int) -> list[Item]:
    """Returns the last `limit` of the items; says on standard error if there are more."""
    if len(items) > limit:
        echo(f"the last {limit}; --limit shows more", err=True)
    return list(items[max(0, len(items) - limit) :])


def table_console() -> Console:
    """Returns a console as wide as the terminal, or `PIPE_WIDTH` if the output is no terminal."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=PIPE_WIDTH)


def print_json(answer: BaseModel | Sequence[BaseModel]) -> None:
    """Prints one model indented, several on one line."""
    if isinstance(answer, BaseModel):
        echo(json.dumps(answer.model_dump(mode="json"), indent=2))
    else:
        echo(json.dumps([item.model_dump(mode="json") for item in answer]))


def fitting_columns(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, first: Sequence[str]
) -> list[int]:
    """Returns the indices of the columns that fit into `width` characters, in order.

    first: columns by importance; those that are not in it count as the least important.
    """
    ranks = {column: rank for rank, column in enumerate(first)}
    by_importance = sorted(range(len(columns)), key=lambda i: ranks.get(columns[i], len(ranks)))
    fitting: list[int] = []
    left = width + GAP
    for index in by_importance:
        left -= max(len(columns[index]), *(len(row[index]) for row in rows), 0) + GAP
        if left < 0:
            break
        fitting.append(index)
    return sorted(fitting)


def local_time(moment: datetime | None) -> str:
    """Returns a moment to the minute in local time, "-" when there is none."""
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M")
