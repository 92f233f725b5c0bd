"""Reads rows of Parquet, JSONL and JSON files, with errors that name the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from bapo_core.spelling import did_you_mean
from services.common.errors import first_line

Row = Mapping[str, Any]
"""The values of a row by column; further columns are ignored."""


class RowError(ValueError):
    """A row that cannot be read, or that is not a problem of the task."""

    def __init__(self, number: int, reason: str) -> None:
        """number: position of the row in its data set, from 1 on."""
        super().__init__(f"row {number}: {reason}")


def read_rows(file: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of a file, whose format is that of its name's suffix.

    columns: columns that the caller needs; a Parquet file is read no further than these.
    Raises `ValueError` for a file that cannot be read, or that lacks one of the columns, and
    `RowError` for such a row.
    """
    match PurePosixPath(name).suffix:
        case ".parquet":
            rows = _read_parquet(file, columns)
        case ".jsonl":
            rows = _read_jsonl(file)
        case ".json":
            rows = _read_json(file)
        case suffix:
            raise ValueError(
                f"the suffix is {suffix!r}; give a file that is named .parquet, .jsonl or .json"
            )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise RowError(number, f"is {row!r:.80}; make every row a JSON object")
        try:
            check_columns(row, columns)
        except ValueError as error:
            raise RowError(number, str(error)) from error
        yield row


def check_columns(present: Iterable[str], columns: Sequence[str]) -> None:
    """Raises `ValueError`, which lists the columns that are present, if one of `columns` is not."""
    names = list(present)
    missing = [column for column in columns if column not in names]
    if missing:
        meant = did_you_mean(missing[0], names) or ";"
        raise ValueError(
            f"no column {', '.join(missing)} (there are {', '.join(names)}){meant} name the "
            "columns of the data in task.columns, as {column of the task: column of the data}, or "
            "with --column of `bapo dataset upload`"
        )


def _read_parquet(file: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            check_columns(parquet.schema_arrow.names, columns)
            for batch in parquet.iter_batches(columns=list(columns)):
                widened = [_widen(column) for column in batch.columns]
                yield from pa.RecordBatch.from_arrays(widened, batch.schema.names).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        reason = first_line(error)
        raise ValueError(f"not a Parquet file ({reason}); export it again") from error


def _widen(column: Any) -> Any:
    """Returns an Arrow column whose float32 values have their shortest decimals: 33.3 stays 33.3.

    As float64, the nearest float32 to 33.3 is 33.29999923706055, which no answer equals.
    """
    import pyarrow as pa

    if pa.types.is_float32(column.type):
        return pa.array(map(shorten_float32, column.to_pylist()), pa.float64())
    if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
        return pa.ListArray.from_arrays(
            column.offsets, _widen(column.values), mask=column.is_null()
        )
    return column


def shorten_float32(value: Any) -> Any:
    """Returns the float whose decimals are the shortest ones of the nearest float32.

    Other values than floats are returned as they are.
    """
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_jsonl(file: BinaryIO) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue  # Editors leave blank lines at the end.
        try:
            yield json.loads(line)
        except ValueError as error:
            raise RowError(number, f"not JSON ({error}); write one object on each line") from error


def _read_json(file: BinaryIO) -> Iterator[Any]:
    try:
        rows = json.loads(file.read())
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write a list of objects") from error
    if not isinstance(rows, list):
        raise ValueError(
            f"is a JSON {type(rows).__name__}; write a list of objects, or one object on each line "
            "of a .jsonl file"
        )
    yield from rows
