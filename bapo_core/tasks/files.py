"""Reads rows of Parquet and JSONL files, with errors that name file and row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any


def rows_of(
    path: str | Path, columns: Sequence[str], example: str, *, limit: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file, row n", row) for at most `limit` rows of a `.parquet` or `.jsonl` file.

    A row has all of `columns` and no others. example: a valid line of JSONL, for error messages.
    Raises `ValueError`, which names file and row, for a file or row that cannot be read.
    """
    file = Path(path)
    if file.suffix == ".parquet":
        rows = _parquet_rows(file, columns)
    elif file.suffix == ".jsonl":
        rows = _jsonl_rows(file, example)
    else:
        raise ValueError(f"{file}: the suffix is {file.suffix!r}; name the file .parquet or .jsonl")
    for number, row in islice(enumerate(rows, start=1), limit):
        where = f"{file}, row {number}"
        if not isinstance(row, dict) or not set(columns) <= row.keys():
            raise ValueError(f"{where}: needs the keys {' and '.join(columns)}, got {row!r:.80}")
        yield where, {column: row[column] for column in columns}


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            missing = sorted(set(columns) - set(names))
            if missing:
                raise ValueError(
                    f"{file}: no column {', '.join(missing)} (there are {', '.join(names)}); "
                    f"rename the columns to {', '.join(columns)}"
                )
            for batch in parquet.iter_batches(columns=list(columns)):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}: not a Parquet file ({error}); export it again") from error


def _jsonl_rows(file: Path, example: str) -> Iterator[Any]:
    # With "replace", bytes that are not UTF-8 are an error of their row, not of the whole file.
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{file}, row {number}: not JSON ({error}); write one object on each line, "
                    f"like {example}"
                ) from error
