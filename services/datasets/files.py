"""Reads rows of Parquet, JSONL and JSON files, with errors that name the row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from bapo_core.spelling import did_you_mean
from services.common.errors import first_line

LARGEST_RATIO = 200
"""Bytes of a Parquet file's columns, decompressed, for each byte of the file. Texts have 3 to 5."""
UNCHECKED_BYTES = 64 << 20
"""Bytes up to which columns may have any ratio."""
BATCH_ROWS = 1024
"""Rows of a Parquet file that are turned into Python's values at a time."""
BATCH_BYTES = 64 << 20
"""Bytes of these rows, for which a batch of large rows has fewer of them."""
LARGEST_BATCH = 1 << 30
"""Bytes of a batch once decoded. A value of a dictionary is stored once and decoded many times."""
FEWEST_ROWS = 16
"""Rows of a batch, however large the values of a dictionary may be."""

Row = Mapping[str, Any]
"""The values of a row by column; further columns are ignored."""


class RowError(ValueError):
    """A row that cannot be read, or that is not a problem of the task."""

    def __init__(self, number: int, reason: str) -> None:
        """number: position of the row in its data set, from 1 on."""
        super().__init__(f"row {number}: {reason}")


def read_rows(
    file: BinaryIO, name: str, columns: Sequence[str], *, others: bool = False
) -> Iterator[Row]:
    """Yields the rows of a file, whose format is that of its name's suffix.

    columns: columns that the caller needs. others: whether the other columns of a Parquet file are
    read, too; the rows of JSON have them all.
    Raises `ValueError` for a file that cannot be read, or that lacks one of the columns, and
    `RowError` for such a row.
    """
    match PurePosixPath(name).suffix:
        case ".parquet":
            rows = _read_parquet(file, columns, others)
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


def _read_parquet(file: BinaryIO, columns: Sequence[str], others: bool) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            present = parquet.schema_arrow.names
            check_columns(present, columns)
            columns = present if others else columns
            rows = _rows_of_batch(file, parquet.metadata, columns)
            # One column after the other, so that not all are decompressed at the same time.
            for batch in parquet.iter_batches(rows, columns=list(columns), use_threads=False):
                if batch.nbytes > LARGEST_BATCH:
                    raise ValueError(
                        f"{batch.num_rows} rows have {batch.nbytes:,} bytes, more than "
                        f"{LARGEST_BATCH:,}; shorten the values, or leave out such rows"
                    )
                widened = [_widen(column) for column in batch.columns]
                yield from pa.RecordBatch.from_arrays(widened, batch.schema.names).to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = first_line(error)
        raise ValueError(f"not a Parquet file ({reason}); export it again") from error


def _rows_of_batch(file: BinaryIO, metadata: Any, columns: Sequence[str]) -> int:
    """Returns how many rows to read at a time, by the sizes that a Parquet file says it has.

    Raises `ValueError` for a small file of large columns: 7 KB can have 1.5 GB of text.
    """
    total, largest_row, largest_value = 0, 1.0, 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [
            chunk
            for chunk in map(group.column, range(group.num_columns))
            if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns)
        ]
        # An empty value has no bytes in the file, and has some in memory.
        size = sum(chunk.total_uncompressed_size + 8 * chunk.num_values for chunk in chunks)
        total += size
        largest_row = max(largest_row, size / max(group.num_rows, 1))
        of_dictionaries = [c.total_uncompressed_size for c in chunks if c.has_dictionary_page]
        largest_value = max(largest_value, *of_dictionaries, 0)
    length = file.seek(0, os.SEEK_END)
    if total > max(UNCHECKED_BYTES, LARGEST_RATIO * length):
        raise ValueError(
            f"its columns {', '.join(columns)} have {total:,} bytes in a file of {length:,}, which "
            f"is more than {LARGEST_RATIO} for each; write the values that repeat by a dictionary "
            "(`use_dictionary` of pyarrow), or without compression"
        )
    fewest = max(FEWEST_ROWS, LARGEST_BATCH // largest_value)
    return max(1, min(BATCH_ROWS, fewest, int(BATCH_BYTES / largest_row)))


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
        except (ValueError, RecursionError) as error:
            raise RowError(number, f"not JSON ({error}); write one object on each line") from error


def _read_json(file: BinaryIO) -> Iterator[Any]:
    try:
        rows = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); write a list of objects") from error
    if not isinstance(rows, list):
        raise ValueError(
            f"is a JSON {type(rows).__name__}; write a list of objects, or one object on each line "
            "of a .jsonl file"
        )
    yield from rows
