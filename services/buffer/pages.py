"""Keyset pagination: a cursor says where the last page ended, so page n costs what page 1 costs."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, tuple_

from services.buffer.api import wire
from services.common.errors import bad_request

Row = TypeVar("Row")
Item = TypeVar("Item")

Key = tuple[int | float | str, ...]


def after_cursor(
    statement: Select[*tuple[Any, ...]],
    columns: Sequence[ColumnElement[Any]],
    order: str,
    cursor: str | None,
    limit: int,
) -> Select[*tuple[Any, ...]]:
    """`statement` ordered by `columns`, from where `cursor` ended, one row more than `limit`."""
    statement = statement.order_by(*columns).limit(limit + 1)
    if cursor is not None:
        statement = statement.where(tuple_(*columns) > tuple_(*_decode(cursor, order, columns)))
    return statement


def page_of(
    rows: Sequence[Row],
    limit: int,
    order: str,
    key: Callable[[Row], Key],
    view: Callable[[Row], Item],
) -> wire.Page[Item]:
    """The first `limit` rows; the cursor says how to go on if there are more."""
    shown = rows[:limit]
    following = _encode(order, key(shown[-1])) if len(rows) > limit else None
    return wire.Page(items=[view(row) for row in shown], next=following)


def _encode(order: str, key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps([order, *key]).encode()).decode().rstrip("=")


def _decode(cursor: str, order: str, columns: Sequence[ColumnElement[Any]]) -> list[Any]:
    refused = bad_request(
        f"cursor: {cursor[:80]!r} is not one that this list gave; start without a cursor, or pass "
        "the `next` of the page before, with the same order"
    )
    try:
        decoded = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError) as error:
        raise refused from error
    if not isinstance(decoded, list) or len(decoded) != len(columns) + 1 or decoded[0] != order:
        raise refused
    kinds = [column.type.python_type for column in columns]
    values = decoded[1:]
    for value, kind in zip(values, kinds, strict=True):
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise refused
    return values
