"""Trajectories as Arrow IPC with zstd: one row a response, the rows of a group together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_uid", pa.string()),
        ("response_index", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_version", pa.int64()),
        ("reward", pa.float32()),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
    ]
)

PROXIMAL_SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("response_index", pa.int32()),
        ("logprobs", pa.list_(pa.float32())),
    ]
)


class TrajectoryError(ValueError):
    """A body that is not whole groups of trajectories; the message says what is wrong where."""


@dataclass(frozen=True, slots=True)
class TrajectoryResponse:
    """One response: `token_ids` and their behaviour log-probs have the same length."""

    token_ids: list[int]
    logprobs: list[float]
    reward: float
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G responses to a prompt, by one policy version."""

    prompt_uid: str
    prompt_token_ids: list[int]
    policy_version: int
    responses: list[TrajectoryResponse]

    @property
    def correct(self) -> int:
        return sum(1 for response in self.responses if response.reward > 0.5)

    @property
    def token_count(self) -> int:
        return sum(len(response.token_ids) for response in self.responses)


def _write(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def read_table(data: bytes, schema: pa.Schema) -> pa.Table:
    """The table in `data`; `TrajectoryError` unless it is Arrow of exactly this schema."""
    try:
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise TrajectoryError(f"not an Arrow IPC stream: {error}") from error
    if not table.schema.equals(schema):
        wanted = ", ".join(f"{field.name}: {field.type}" for field in schema)
        raise TrajectoryError(f"the columns must be exactly ({wanted})")
    if any(column.null_count for column in table.columns):
        raise TrajectoryError("the columns must not hold nulls")
    return table


def encode_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    """Whole groups as Arrow IPC."""
    rows = [
        {
            "group": index,
            "prompt_uid": group.prompt_uid,
            "response_index": position,
            "prompt_token_ids": group.prompt_token_ids,
            "token_ids": response.token_ids,
            "logprobs": response.logprobs,
            "policy_version": group.policy_version,
            "reward": response.reward,
            "finish_reason": response.finish_reason,
            "text": response.text,
        }
        for index, group in enumerate(groups)
        for position, response in enumerate(group.responses)
    ]
    return _write(pa.Table.from_pylist(rows, schema=SCHEMA))


def decode_groups(data: bytes) -> list[TrajectoryGroup]:
    """The whole groups of `data`, in order; `TrajectoryError` says what is wrong in which."""
    return groups_of(read_table(data, SCHEMA))


def groups_of(table: pa.Table) -> list[TrajectoryGroup]:
    """The groups of a table (or of a slice on group boundaries)."""
    groups: list[TrajectoryGroup] = []
    current: int | None = None
    seen: set[int] = set()
    for row in table.to_pylist():
        if row["group"] != current:
            current = row["group"]
            if current in seen:
                raise TrajectoryError(f"group {current}: its rows are not together")
            seen.add(current)
            groups.append(
                TrajectoryGroup(
                    row["prompt_uid"], row["prompt_token_ids"], row["policy_version"], []
                )
            )
        _check_row(row, groups[-1])
        groups[-1].responses.append(
            TrajectoryResponse(
                row["token_ids"], row["logprobs"], row["reward"], row["finish_reason"], row["text"]
            )
        )
    return groups


def _check_row(row: dict[str, object], group: TrajectoryGroup) -> None:
    where = f"group {row['group']}, response {row['response_index']}"
    tokens, logprobs = row["token_ids"], row["logprobs"]
    assert isinstance(tokens, list)
    assert isinstance(logprobs, list)
    if row["response_index"] != len(group.responses):
        raise TrajectoryError(f"{where}: responses must be numbered 0, 1, ... in order")
    if (row["prompt_uid"], row["policy_version"]) != (group.prompt_uid, group.policy_version):
        raise TrajectoryError(f"{where}: a group has one prompt and one policy version")
    if not tokens or len(tokens) != len(logprobs):
        raise TrajectoryError(f"{where}: {len(tokens)} tokens but {len(logprobs)} log-probs")
    if not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
        raise TrajectoryError(f"{where}: log-probs must be finite and not above 0")
    if row["reward"] not in (0.0, 1.0):
        raise TrajectoryError(f"{where}: reward is {row['reward']}, must be 0 or 1")


def encode_proximal(logprobs: dict[int, list[list[float]]]) -> bytes:
    """Log-probs of the trainer at the storage step, by group id and response."""
    rows = [
        {"group_id": group_id, "response_index": index, "logprobs": values}
        for group_id, responses in logprobs.items()
        for index, values in enumerate(responses)
    ]
    return _write(pa.Table.from_pylist(rows, schema=PROXIMAL_SCHEMA))


def decode_proximal(data: bytes) -> dict[int, list[list[float]]]:
    """What `encode_proximal` wrote."""
    found: dict[int, list[list[float]]] = {}
    for row in read_table(data, PROXIMAL_SCHEMA).to_pylist():
        found.setdefault(row["group_id"], []).append(row["logprobs"])
    return found
