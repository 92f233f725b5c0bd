"""File format of trajectories: Arrow IPC with zstd, one row per response.

The rows of a group are contiguous. `SCHEMA` has the columns of trajectories, `PROXIMAL_SCHEMA`
those of the trainer's log-probs at the storage step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bapo_core.outcomes import Outcome, has_answer
from bapo_core.rewards import ANSWER, FAILED
from services.buffer.api.arrow_size import UnreadableStream, memory_of

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
        ("correct", pa.bool_()),
        ("reward_parts", pa.map_(pa.string(), pa.float32())),
        ("answer", pa.string()),
        ("interruptions", pa.map_(pa.int32(), pa.int64())),
        ("outcome", pa.string()),
        ("repeated", pa.map_(pa.string(), pa.int32())),
        ("status", pa.string()),
        ("extracted", pa.string()),
        ("failure", pa.string()),
    ]
)
"""The columns of trajectories. Those of `NULLABLE` may hold nulls."""
NULLABLE = ("answer", "status", "extracted", "failure")
"""Columns that earlier versions did not record; `extracted` is null without an answer, too, and
`failure` with a verdict."""


def _columns_up_to(last: str) -> pa.Schema:
    return pa.schema(list(SCHEMA)[: SCHEMA.get_field_index(last) + 1])


_SCHEMA_WITHOUT_FAILURES = _columns_up_to("extracted")
_SCHEMA_WITHOUT_STATUSES = _columns_up_to("repeated")
_SCHEMA_WITHOUT_OUTCOMES = _columns_up_to("interruptions")
_SCHEMA_WITHOUT_INTERRUPTIONS = _columns_up_to("answer")
_SCHEMA_WITHOUT_ANSWERS = _columns_up_to("reward_parts")
_OLD_SCHEMA = _columns_up_to("text")
"""The columns of objects that were stored while rewards were 0 or 1."""
_OLDER_SCHEMAS = (
    _SCHEMA_WITHOUT_FAILURES,
    _SCHEMA_WITHOUT_STATUSES,
    _SCHEMA_WITHOUT_OUTCOMES,
    _SCHEMA_WITHOUT_INTERRUPTIONS,
    _SCHEMA_WITHOUT_ANSWERS,
    _OLD_SCHEMA,
)

PROXIMAL_SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("response_index", pa.int32()),
        ("logprobs", pa.list_(pa.float32())),
    ]
)


class TrajectoryError(ValueError):
    """Data that is not whole groups of trajectories; the message names group and response."""


@dataclass(frozen=True, slots=True)
class TrajectoryResponse:
    """A response to a prompt.

    token_ids: tokens of the response, without the prompt's. logprobs: their log-probs under the
    policy that sampled them, of the same length. correct: whether it counts for the difficulty of
    its prompt. reward_parts: parts of the reward by name, without weights (`bapo_core.rewards`).
    answer: the extracted answer, as the task normalises it; empty without one, None if it was not
    recorded. interruptions: where other weights went on with the response (`sync.
    interrupt_rollouts`): the index of the first token that each of them sampled, and their policy
    version; empty if the group's policy version sampled all tokens. outcome: what happened to it.
    repeated: how often it had to be sampled or scored again, by the `Outcome` that was the cause.
    status: the verifier's, such as `ok` or `no_answer`; None if it was not recorded. extracted: the
    answer as the verifier read it, before it was normalised; None without one. failure: why the
    reward function gave no verdict; None if it gave one.
    """

    token_ids: list[int]
    logprobs: list[float]
    reward: float
    finish_reason: str
    text: str
    correct: bool
    reward_parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    interruptions: dict[int, int] = field(default_factory=dict)
    outcome: Outcome = Outcome.SCORED
    repeated: dict[str, int] = field(default_factory=dict)
    status: str | None = None
    extracted: str | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G responses to a prompt, sampled by one policy version unless they were interrupted."""

    prompt_uid: str
    prompt_token_ids: list[int]
    policy_version: int
    responses: list[TrajectoryResponse]

    @property
    def correct(self) -> int:
        """k: number of correct responses."""
        return sum(response.correct for response in self.responses)

    @property
    def token_count(self) -> int:
        """Number of response tokens of all responses together."""
        return sum(len(response.token_ids) for response in self.responses)


LARGEST_TABLE = 1 << 30
"""Largest number of bytes of a table in memory. A step of 256 groups x 8 responses x 4,096 tokens
takes some 100 MiB."""
ROWS_AT_ONCE = 64
"""Rows of a record batch, which a streaming reader holds in memory."""


def write_table(table: pa.Table) -> bytes:
    """Encodes a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=ROWS_AT_ONCE)
    return bytes(sink.getvalue().to_pybytes())


def read_table(data: bytes, schema: pa.Schema, *older: pa.Schema) -> pa.Table:
    """Decodes an Arrow IPC stream.

    Raises `TrajectoryError` unless it has exactly the columns of `schema`, or of one of the `older`
    ones, without nulls but in the columns of `NULLABLE`, and takes at most `LARGEST_TABLE` bytes.
    """
    try:
        size = memory_of(data)
        if size > LARGEST_TABLE:
            raise TrajectoryError(
                f"its columns take {size} bytes of memory, more than {LARGEST_TABLE}; send fewer "
                "groups at a time"
            )
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError, UnreadableStream) as error:
        raise TrajectoryError(f"not an Arrow IPC stream: {error}") from error
    if not any(map(table.schema.equals, (schema, *older))):
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
        raise TrajectoryError(f"the columns must be exactly ({columns})")
    if any(table[name].null_count for name in table.schema.names if name not in NULLABLE):
        raise TrajectoryError("the columns must not hold nulls")
    return table


def read_trajectories(data: bytes) -> pa.Table:
    """Decodes an Arrow IPC stream of trajectories to a table of `SCHEMA`.

    Raises `TrajectoryError` for other columns than those of this version or an earlier one.
    """
    return with_all_columns(read_table(data, SCHEMA, *_OLDER_SCHEMAS))


def with_all_columns(table: pa.Table) -> pa.Table:
    """Returns the table with all columns from `correct` on.

    Tables of earlier versions lack some of them: reasons of failures, and statuses and extracted
    answers, which are null then; outcomes, which follow from the part `failed` of
    the rewards; interruptions, of which there were none; answers,
    which are null then; or all, if rewards are 0 or 1, from which `correct` and `reward_parts`
    follow.
    """
    columns = table.columns
    if table.schema.equals(_OLD_SCHEMA):
        rewards = table["reward"].combine_chunks()
        offsets = pa.array(range(table.num_rows + 1), pa.int32())
        names = pa.array([ANSWER] * table.num_rows, pa.string())
        parts = pa.MapArray.from_arrays(offsets, names, rewards)
        columns = [*columns, pc.equal(rewards, 1), parts]
    if len(columns) == len(_SCHEMA_WITHOUT_ANSWERS):
        columns = [*columns, pa.nulls(table.num_rows, pa.string())]
    if len(columns) == len(_SCHEMA_WITHOUT_INTERRUPTIONS):
        none = pa.array([[]] * table.num_rows, SCHEMA.field("interruptions").type)
        columns = [*columns, none]
    if len(columns) == len(_SCHEMA_WITHOUT_OUTCOMES):
        parts = pa.chunked_array(columns[SCHEMA.get_field_index("reward_parts")]).to_pylist()
        outcomes = [
            Outcome.CRASHED if FAILED in dict(of_response) else Outcome.SCORED
            for of_response in parts
        ]
        none = pa.array([[]] * table.num_rows, SCHEMA.field("repeated").type)
        columns = [*columns, pa.array(outcomes, pa.string()), none]
    if len(columns) == len(_SCHEMA_WITHOUT_STATUSES):
        columns = [*columns, *2 * [pa.nulls(table.num_rows, pa.string())]]
    if len(columns) == len(_SCHEMA_WITHOUT_FAILURES):
        columns = [*columns, pa.nulls(table.num_rows, pa.string())]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def encode_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    """Encodes whole groups as an Arrow IPC stream with the columns of `SCHEMA`."""
    return write_table(table_of(groups))


def table_of(groups: Sequence[TrajectoryGroup]) -> pa.Table:
    """Returns whole groups as a table of `SCHEMA`."""
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
            "correct": response.correct,
            "reward_parts": response.reward_parts,
            "answer": response.answer,
            "interruptions": response.interruptions,
            "outcome": response.outcome,
            "repeated": response.repeated,
            "status": response.status,
            "extracted": response.extracted,
            "failure": response.failure,
        }
        for index, group in enumerate(groups)
        for position, response in enumerate(group.responses)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of a group in a table, and its totals.

    correct: k, number of correct responses. token_count: number of response tokens. mean_reward:
    mean reward of the responses. reward_parts: mean of each part of the reward, where a response
    without the part counts as 0. verdicts: whether each response is correct. answers: the answer of
    each response, as in `TrajectoryResponse`. rewards: the reward of each response. parts: the
    parts of the reward of each response. mean_logprobs:
    the mean log-prob of the tokens of each response. outcomes: number of responses of each outcome.
    repeated: how often responses were sampled or scored again, by cause. cut_off: number of
    responses that reached the largest number of tokens.
    """

    prompt_uid: str
    policy_version: int
    row_start: int
    row_count: int
    correct: int
    token_count: int
    mean_reward: float
    reward_parts: dict[str, float]
    verdicts: list[bool]
    answers: list[str | None]
    rewards: list[float]
    parts: list[dict[str, float]]
    mean_logprobs: list[float]
    outcomes: dict[str, int]
    repeated: dict[str, int]
    cut_off: int


def check_groups(table: pa.Table) -> list[GroupRows]:
    """Checks a table of `SCHEMA` and returns its groups in order.

    Works on whole columns: a step of a million tokens is checked in milliseconds. Raises
    `TrajectoryError` unless the groups are whole, log-probs are finite and not above 0, and rewards
    and their parts are finite.
    """
    if table.num_rows == 0:
        return []
    rows = _Rows(table.combine_chunks())
    rows.check(
        rows.indexes == rows.expected_indexes, "responses must be numbered 0, 1, ... in order"
    )
    rows.check(rows.same_in_group("prompt_uid"), "a group has one prompt and one policy version")
    rows.check(
        rows.same_in_group("policy_version"), "a group has one prompt and one policy version"
    )
    tokens, logprobs = rows.lengths("token_ids"), rows.lengths("logprobs")
    rows.check(
        (tokens > 0) & (tokens == logprobs),
        lambda row: f"{tokens[row]} tokens but {logprobs[row]} log-probs",
    )
    for name in ("prompt_token_ids", "token_ids"):
        rows.check_values(name, lambda ids: ids >= 0, "token ids must not be negative")
    rows.check_values(
        "logprobs",
        lambda values: np.isfinite(values) & (values <= 1e-4),
        "log-probs must be finite and not above 0",
    )
    outcomes = rows.column("outcome").to_pylist()
    rows.check(
        np.array([outcome in _WITH_ANSWER for outcome in outcomes]),
        lambda row: f"the outcome is {outcomes[row]}: a response without an answer is done again",
    )
    repeated = rows.column("repeated").to_pylist()
    is_cut = pc.equal(rows.column("finish_reason"), "length").to_numpy(zero_copy_only=False)
    rewards = rows.numbers("reward")
    rows.check(np.isfinite(rewards), lambda row: f"the reward is {rewards[row]}, must be finite")
    uids = rows.column("prompt_uid").take(pa.array(rows.starts)).to_pylist()
    versions = rows.numbers("policy_version")[rows.starts].tolist()
    counts = np.diff(np.append(rows.starts, table.num_rows)).tolist()
    is_correct = rows.numbers("correct")
    correct = np.add.reduceat(is_correct.astype(int), rows.starts).tolist()
    mean_rewards = (np.add.reduceat(rewards.astype(float), rows.starts) / counts).tolist()
    mean_parts = rows.mean_parts(np.array(counts))
    parts = [dict(of_response) for of_response in rows.column("reward_parts").to_pylist()]
    token_counts = np.add.reduceat(tokens, rows.starts).tolist()
    starts = rows.starts.tolist()
    values = rows.column("logprobs").flatten().to_numpy(zero_copy_only=False).astype(float)
    mean_logprobs = np.add.reduceat(values, np.append(0, np.cumsum(tokens)[:-1])) / tokens
    verdicts, answers = is_correct.tolist(), rows.column("answer").to_pylist()
    slices = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return [
        GroupRows(*values)
        for values in zip(
            uids,
            versions,
            starts,
            counts,
            correct,
            token_counts,
            mean_rewards,
            mean_parts,
            [verdicts[of_group] for of_group in slices],
            [answers[of_group] for of_group in slices],
            [rewards[of_group].tolist() for of_group in slices],
            [parts[of_group] for of_group in slices],
            [mean_logprobs[of_group].tolist() for of_group in slices],
            [dict(Counter(outcomes[of_group])) for of_group in slices],
            [_add_counts(repeated[of_group]) for of_group in slices],
            np.add.reduceat(is_cut.astype(int), rows.starts).tolist(),
            strict=True,
        )
    ]


_WITH_ANSWER = frozenset(str(outcome) for outcome in Outcome if has_answer(outcome))


def _add_counts(of_responses: Sequence[Sequence[tuple[str, int]]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in of_responses:
        total.update(dict(counts))
    return dict(total)


class _Rows:
    """Columns of a table in one chunk, with the bounds of its groups."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.groups = self.numbers("group")
        self.indexes = self.numbers("response_index")
        self.starts = np.flatnonzero(np.append(True, np.diff(self.groups) != 0))
        labels, firsts = np.unique(self.groups[self.starts], return_index=True)
        if len(labels) != len(self.starts):
            repeated = self.groups[
                self.starts[np.setdiff1d(np.arange(len(self.starts)), firsts)[0]]
            ]
            raise TrajectoryError(f"group {repeated}: its rows are not together")
        group_of_row = np.cumsum(np.append(True, np.diff(self.groups) != 0)) - 1
        self.first_rows = self.starts[group_of_row]
        self.expected_indexes = np.arange(table.num_rows) - self.first_rows

    def column(self, name: str) -> pa.Array:
        return self._table[name].chunk(0)

    def numbers(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self.column(name).to_numpy(zero_copy_only=False)
        return values

    def lengths(self, name: str) -> NDArray[Any]:
        lengths: NDArray[Any] = pc.list_value_length(self.column(name)).to_numpy(
            zero_copy_only=False
        )
        return lengths

    def same_in_group(self, name: str) -> NDArray[np.bool_]:
        """Returns for each row whether it has the value of its group's first row."""
        codes = self.column(name).dictionary_encode().indices.to_numpy(zero_copy_only=False)
        same: NDArray[np.bool_] = codes == codes[self.first_rows]
        return same

    def check(self, valid: NDArray[np.bool_], rule: str | Callable[[int], str]) -> None:
        """Raises `TrajectoryError` with `rule` for the first row that is not valid."""
        if not valid.all():
            row = int(np.argmin(valid))
            self._refuse(row, rule if isinstance(rule, str) else rule(row))

    def check_values(
        self, name: str, valid: Callable[[NDArray[Any]], NDArray[np.bool_]], rule: str
    ) -> None:
        """Raises `TrajectoryError` with `rule` unless all values in a column's lists are valid."""
        values = self.column(name).flatten()
        if values.null_count:
            raise TrajectoryError(f"the column {name} must not hold nulls in its lists")
        value_is_valid = valid(values.to_numpy(zero_copy_only=False))
        if not value_is_valid.all():
            first_invalid = int(np.argmin(value_is_valid))
            ends = np.cumsum(self.lengths(name))
            self._refuse(int(np.searchsorted(ends, first_invalid, side="right")), rule)

    def mean_parts(self, counts: NDArray[np.int_]) -> list[dict[str, float]]:
        """Returns the mean of each part of the rewards of each group, of `counts` responses.

        Raises `TrajectoryError` for a part that is not finite, or that a response has twice.
        """
        parts = self.column("reward_parts")
        lengths = np.diff(parts.offsets.to_numpy())
        row_of_part = np.repeat(np.arange(len(lengths)), lengths)
        first, last = int(parts.offsets[0].as_py()), int(parts.offsets[-1].as_py())
        names = parts.keys.slice(first, last - first).dictionary_encode()
        values = parts.items.slice(first, last - first)
        if values.null_count:
            raise TrajectoryError("the column reward_parts must not hold nulls")
        values = values.to_numpy(zero_copy_only=False).astype(float)
        finite = np.isfinite(values)
        if not finite.all():
            self._refuse(int(row_of_part[np.argmin(finite)]), "parts of rewards must be finite")
        codes = names.indices.to_numpy(zero_copy_only=False)
        known: list[str] = names.dictionary.to_pylist()
        cells = row_of_part * max(1, len(known)) + codes
        unique, firsts = np.unique(cells, return_index=True)
        if len(unique) < len(cells):
            repeated = np.setdiff1d(np.arange(len(cells)), firsts)[0]
            self._refuse(int(row_of_part[repeated]), "a part of a reward is given twice")
        sums = np.zeros((len(lengths), len(known)))
        sums[row_of_part, codes] = values
        present = np.zeros((len(lengths), len(known)), dtype=bool)
        present[row_of_part, codes] = True
        means = np.add.reduceat(sums, self.starts) / counts[:, None]
        in_group = np.logical_or.reduceat(present, self.starts)
        return [
            {name: value for name, value, has in zip(known, row, mask, strict=True) if has}
            for row, mask in zip(means.tolist(), in_group.tolist(), strict=True)
        ]

    def _refuse(self, row: int, rule: str) -> None:
        raise TrajectoryError(f"group {self.groups[row]}, response {self.indexes[row]}: {rule}")


def decode_groups(data: bytes) -> list[TrajectoryGroup]:
    """Decodes whole groups, in order. Raises `TrajectoryError` for anything else."""
    return groups_of(read_trajectories(data))


def groups_of(table: pa.Table) -> list[TrajectoryGroup]:
    """Returns the groups of a table of `SCHEMA`, or of a slice of it that has whole groups."""
    return [_group(table.slice(rows.row_start, rows.row_count)) for rows in check_groups(table)]


def _group(table: pa.Table) -> TrajectoryGroup:
    rows = table.to_pylist()
    responses = [
        TrajectoryResponse(
            row["token_ids"],
            row["logprobs"],
            row["reward"],
            row["finish_reason"],
            row["text"],
            row["correct"],
            dict(row["reward_parts"]),
            row["answer"],
            dict(row["interruptions"]),
            Outcome(row["outcome"]),
            dict(row["repeated"]),
            row["status"],
            row["extracted"],
            row["failure"],
        )
        for row in rows
    ]
    first = rows[0]
    return TrajectoryGroup(
        first["prompt_uid"], first["prompt_token_ids"], first["policy_version"], responses
    )


def encode_proximal(logprobs: dict[int, list[list[float]]]) -> bytes:
    """Encodes the trainer's log-probs at the storage step, by group id and response."""
    rows = [
        {"group_id": group_id, "response_index": index, "logprobs": values}
        for group_id, responses in logprobs.items()
        for index, values in enumerate(responses)
    ]
    return write_table(pa.Table.from_pylist(rows, schema=PROXIMAL_SCHEMA))


def read_proximal(data: bytes) -> pa.Table:
    """Decodes what `encode_proximal` returned to a table of `PROXIMAL_SCHEMA`.

    The responses of a group are in order. Raises `TrajectoryError` for anything else.
    """
    return read_table(data, PROXIMAL_SCHEMA)
