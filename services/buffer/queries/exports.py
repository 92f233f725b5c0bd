"""Streaming downloads, whose memory does not grow with their size."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from services.buffer.api.trajectories import SCHEMA, with_all_columns
from services.buffer.api.wire import ManifestMember
from services.buffer.storage.lineage import of_run
from services.buffer.storage.stored_groups import SUMMARY_COLUMNS
from services.buffer.storage.tables import PromptDifficulty, PromptRow, RolloutGroup, Run
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

GROUP_SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("prompt_uid", pa.string()),
        ("step", pa.int32()),
        ("correct", pa.int32()),
        ("size", pa.int32()),
        ("policy_version", pa.int32()),
        ("lowest_reward", pa.float64()),
        ("highest_reward", pa.float64()),
        ("kind", pa.string()),
        ("tokens", pa.int64()),
        ("cut_off", pa.int32()),
        ("position", pa.int64()),
    ]
)
"""The fields of a `GroupSummary` in their order, the group's kind, its response tokens, the number
of its responses that reached the largest number of tokens (null if it is not known), and the
position of its prompt in the dataset."""


class _Sink:
    """A writable file whose content is taken out piece by piece."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> int:
        self._chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Does nothing: nothing is buffered besides what `take` returns."""

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        """Returns and forgets what was written since the last call."""
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data


def arrow_of(store: ObjectStore, members: Sequence[ManifestMember]) -> Iterator[bytes]:
    """Yields the trajectories of these groups as one Arrow IPC stream, group by group.

    The column `group` is renumbered from 0 in the order of `members`, because it counts within each
    object. Objects are read a record batch at a time. A damaged object shows only at its end: the
    stream then breaks off before its end-of-stream marker, so no reader takes it for complete.
    """
    sink = _Sink()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        for number, rows in enumerate(rows_of_groups(store, members)):
            numbers = pa.array([number] * rows.num_rows, pa.int32())
            writer.write_table(rows.set_column(0, SCHEMA.field(0), numbers))
            yield sink.take()
    yield sink.take()


def rows_of_groups(
    store: ObjectStore, members: Sequence[ManifestMember]
) -> Generator[pa.Table, None, None]:
    """Yields the rows of each group. Groups that follow each other in an object share one pass."""
    for chunk in _split_by_object(members):
        with store.stream(chunk[0].object_key, chunk[0].object_digest) as stream:
            reader = pa.ipc.open_stream(pa.PythonFile(stream, mode="r"))
            buffered, first = SCHEMA.empty_table(), 0  # rows that were read, index of the first
            for member in chunk:
                end = member.row_start + member.row_count
                while first + buffered.num_rows < end:
                    # Rows before this group are not needed any more.
                    passed = min(max(member.row_start - first, 0), buffered.num_rows)
                    buffered, first = buffered.slice(passed), first + passed
                    rows = pa.Table.from_batches([reader.read_next_batch()])
                    buffered = pa.concat_tables([buffered, with_all_columns(rows)])
                yield buffered.slice(member.row_start - first, member.row_count)
            stream.check()


def _split_by_object(members: Sequence[ManifestMember]) -> Iterator[list[ManifestMember]]:
    """Splits members into chunks whose rows are in one object, in ascending order."""
    chunk: list[ManifestMember] = []
    for member in members:
        last = chunk[-1] if chunk else member
        if member.object_key != last.object_key or member.row_start < last.row_start:
            yield chunk
            chunk = []
        chunk.append(member)
    if chunk:
        yield chunk


def groups_arrow(
    sessions: sessionmaker[Session], run: Run, first: int, last: int
) -> Iterator[bytes]:
    """Yields summaries of the training groups of these steps as one Arrow IPC stream.

    They are in the order of their step, their kind, and the drawing of their prompts.
    """
    statement = (
        select(
            *SUMMARY_COLUMNS,
            RolloutGroup.kind,
            RolloutGroup.token_count,
            RolloutGroup.cut_off,
            PromptRow.position,
        )
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            of_run(run, RolloutGroup.run_id, RolloutGroup.step),
            RolloutGroup.step.between(first, last),
            RolloutGroup.kind != "evaluation",
        )
        .order_by(RolloutGroup.step, RolloutGroup.kind, RolloutGroup.position)
    )
    sink = _Sink()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, GROUP_SCHEMA, options=options) as writer, sessions() as session:
        rows = session.execute(statement.execution_options(yield_per=ROWS_AT_ONCE))
        for partition in rows.partitions():
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(zip(*partition, strict=True), GROUP_SCHEMA, strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=GROUP_SCHEMA))
            yield sink.take()
    yield sink.take()


def difficulty_parquet(sessions: sessionmaker[Session], run: Run) -> Iterator[bytes]:
    """Yields the difficulty of all attempted training prompts as a Parquet file, by prompt id."""
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
        for partition in rows.partitions():
            columns = [list(column) for column in zip(*partition, strict=True)]
            columns[1] = [json.dumps(payload) for payload in columns[1]]
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(columns, DIFFICULTY_SCHEMA, strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=DIFFICULTY_SCHEMA))
            yield sink.take()
    yield sink.take()
