"""Keyset pagination: a cursor holds the key of the last row, so page n costs what page 1 costs."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, tuple_

from services.buffer.api import wire
from services.common.problems import bad_request

Row = TypeVar("Row")
Item = TypeVar("Item")

Key = tuple[int | float | str, ...]
"""Values of the columns that a list is ordered by, for one row."""


def after_cursor(
    statement: Select[*tuple[Any, ...]],
    columns: Sequence[ColumnElement[Any]],
    order: str,
    cursor: str | None,
    limit: int,
) -> Select[*tuple[Any, ...]]:
    """Orders a statement by `columns` and limits it to the rows after `cursor`.

    It selects one row more than `limit`, from which `page_of` sees that there is a next page.
    `order` names the order; raises 400 for a cursor of another order.
    """
    statement = statement.order_by(*columns).limit(limit + 1)
    if cursor is not None:
        statement = statement.where(
            tuple_(*columns) > tuple_(*decode_cursor(cursor, order, columns))
        )
    return statement


def page_of(
    rows: Sequence[Row],
    limit: int,
    order: str,
    key: Callable[[Row], Key],
    view: Callable[[Row], Item],
) -> wire.Page[Item]:
    """Builds a page of the first `limit` rows, with the cursor of the next page if there is one."""
    page_rows = rows[:limit]
    cursor = encode_cursor(order, key(page_rows[-1])) if len(rows) > limit else None
    return wire.Page(items=[view(row) for row in page_rows], next=cursor)


def encode_cursor(order: str, key: Key) -> str:
    """Returns the cursor after the row of this key in a list of this order."""
    return base64.urlsafe_b64encode(json.dumps([order, *key]).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, order: str, columns: Sequence[ColumnElement[Any]]) -> list[Any]:
    """Returns the key of a cursor, which has values of the types of `columns`.

    Raises 400 for a cursor of another order.
    """
    refused = bad_request(
        f"cursor: {cursor[:80]!r} is not a cursor of this list; start without a cursor, or pass "
        "the `next` of the page before, with the same order"
    )
    try:
        decoded = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise refused from error
    if not isinstance(decoded, list) or len(decoded) != len(columns) + 1 or decoded[0] != order:
        raise refused
    column_types = [column.type.python_type for column in columns]
    values = decoded[1:]
    for value, column_type in zip(values, column_types, strict=True):
        accepted = (int, float) if column_type is float else column_type
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise refused
        # JSON may name half a character, which no database can compare with.
        if isinstance(value, str) and not value.isascii() and _has_surrogate(value):
            raise refused
    return values


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
