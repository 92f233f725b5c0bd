"""Downloads that stream: what they take in memory does not grow with what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from services.buffer.api.trajectories import SCHEMA
from services.buffer.api.wire import ManifestMember
from services.buffer.tables import PromptDifficulty, PromptRow, Run
from services.common.objectstore import ObjectStore

ROWS_AT_ONCE = 10_000

DIFFICULTY_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("payload", pa.string()),
        ("attempts", pa.int64()),
        ("first_mean", pa.float64()),
        ("last_mean", pa.float64()),
        ("best_mean", pa.float64()),
        ("first_solved_step", pa.int64()),
        ("last_step", pa.int64()),
        ("bin", pa.int32()),
    ]
)


class _Sink:
    """A file that is handed on as it is written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self.closed = True

    def taken(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def arrow_of(store: ObjectStore, members: Sequence[ManifestMember]) -> Iterator[bytes]:
    """The trajectories of these groups as one Arrow IPC stream, group by group.

    `group` is renumbered in their order: in the objects it counts within each of them. Objects are
    read as they come, a record batch at a time. Damage shows only at an object's end: the stream
    then breaks off before its own end, which a reader cannot mistake for a whole one.
    """
    sink = _Sink()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        for number, rows in enumerate(_rows_of(store, members)):
            numbers = pa.array([number] * rows.num_rows, pa.int32())
            writer.write_table(rows.set_column(0, SCHEMA.field(0), numbers))
            yield sink.taken()
    yield sink.taken()


def _rows_of(store: ObjectStore, members: Sequence[ManifestMember]) -> Iterator[pa.Table]:
    """The rows of each group. Groups that lie in order in one object are read in one pass."""
    for passing in _passes(members):
        with store.stream(passing[0].object_key, passing[0].object_digest) as stream:
            reader = pa.ipc.open_stream(pa.PythonFile(stream, mode="r"))
            held, first = SCHEMA.empty_table(), 0
            for member in passing:
                end = member.row_start + member.row_count
                while first + held.num_rows < end:
                    # What lies before this group is not needed any more.
                    passed = min(max(member.row_start - first, 0), held.num_rows)
                    held, first = held.slice(passed), first + passed
                    held = pa.concat_tables(
                        [held, pa.Table.from_batches([reader.read_next_batch()])]
                    )
                yield held.slice(member.row_start - first, member.row_count)
            stream.check()


def _passes(members: Sequence[ManifestMember]) -> Iterator[list[ManifestMember]]:
    """Cuts the members where the next one is in another object, or before the last in its own."""
    passing: list[ManifestMember] = []
    for member in members:
        last = passing[-1] if passing else member
        if member.object_key != last.object_key or member.row_start < last.row_start:
            yield passing
            passing = []
        passing.append(member)
    if passing:
        yield passing


def difficulty_parquet(sessions: sessionmaker[Session], run: Run) -> Iterator[bytes]:
    """Every attempted training prompt of a run as Parquet, in the order of storage."""
    statement = (
        select(
            PromptRow.uid,
            PromptRow.payload,
            PromptDifficulty.attempts,
            PromptDifficulty.first_mean,
            PromptDifficulty.last_mean,
            PromptDifficulty.best_mean,
            PromptDifficulty.first_solved_step,
            PromptDifficulty.last_step,
            PromptDifficulty.bin,
        )
        .join(PromptRow, PromptRow.id == PromptDifficulty.prompt_id)
        .where(PromptDifficulty.run_id == run.id)
        .order_by(PromptDifficulty.prompt_id)
    )
    sink = _Sink()
    with (
        pq.ParquetWriter(sink, DIFFICULTY_SCHEMA, compression="zstd") as writer,
        sessions() as session,
    ):
        rows = session.execute(statement.execution_options(yield_per=ROWS_AT_ONCE))
        for part in rows.partitions():
            columns = [list(column) for column in zip(*part, strict=True)]
            columns[1] = [json.dumps(payload) for payload in columns[1]]
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(columns, DIFFICULTY_SCHEMA, strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=DIFFICULTY_SCHEMA))
            yield sink.taken()
    yield sink.taken()
