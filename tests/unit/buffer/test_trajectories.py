"""Trajectory files: decoding inverts encoding, and anything but whole groups is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.outcomes import Outcome
from services.buffer.api.trajectories import (
    SCHEMA,
    TrajectoryError,
    TrajectoryGroup,
    TrajectoryResponse,
    check_groups,
    decode_groups,
    encode_groups,
    encode_proximal,
    read_proximal,
    read_trajectories,
    write_table,
)

logprobs = st.floats(-50, 0, width=32)


@st.composite
def responses(draw: st.DrawFn) -> TrajectoryResponse:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
    return TrajectoryResponse(
        token_ids=tokens,
        logprobs=draw(st.lists(logprobs, min_size=len(tokens), max_size=len(tokens))),
        reward=draw(st.floats(-1e6, 1e6, width=32)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(st.text(max_size=10)),
        correct=draw(st.booleans()),
        reward_parts=draw(
            st.dictionaries(st.sampled_from(["answer", "format"]), st.floats(-9, 9, width=32))
        ),
        answer=draw(st.none() | st.text(max_size=3)),
        interruptions=draw(st.dictionaries(st.integers(0, 4), st.integers(1, 2**40))),
        status=draw(st.none() | st.sampled_from(["ok", "no_answer"])),
        extracted=draw(st.none() | st.text(max_size=3)),
        failure=draw(st.none() | st.text(max_size=3)),
    )


groups = st.builds(
    TrajectoryGroup,
    prompt_uid=st.text(min_size=1, max_size=10),
    prompt_token_ids=st.lists(st.integers(0, 1000), max_size=5),
    policy_version=st.integers(1, 2**40),
    responses=st.lists(responses(), min_size=1, max_size=4),
)


@given(st.lists(groups, max_size=4))
def test_decoding_inverts_encoding(written: list[TrajectoryGroup]) -> None:
    assert decode_groups(encode_groups(written)) == written


def rows() -> list[dict[str, Any]]:
    """Rows of two groups of two responses."""
    return [
        {
            "group": group,
            "prompt_uid": f"p{group}",
            "response_index": index,
            "prompt_token_ids": [1],
            "token_ids": [2, 3],
            "logprobs": [-1.0, -2.0],
            "policy_version": 1,
            "reward": 1.0,
            "finish_reason": "stop",
            "text": "x",
            "correct": True,
            "reward_parts": {"answer": 1.0},
            "answer": "x",
            "interruptions": {},
            "outcome": "scored",
            "repeated": {},
            "status": "ok",
            "extracted": "x",
            "failure": None,
        }
        for group in range(2)
        for index in range(2)
    ]


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (1, {"reward": float("nan")}, "group 0, response 1: the reward is nan, must be finite"),
        (2, {"reward_parts": {"answer": float("inf")}}, "group 1, response 0: parts of rewards"),
        (3, {"reward_parts": [("a", 1.0), ("a", 1.0)]}, "response 1: a part of a reward is given"),
        (3, {"logprobs": [-1.0]}, "group 1, response 1: 2 tokens but 1 log-probs"),
        (2, {"logprobs": [-1.0, float("nan")]}, "must be finite"),
        (2, {"logprobs": [-1.0, 0.5]}, "not above 0"),
        (1, {"policy_version": 2}, "one prompt and one policy version"),
        (1, {"prompt_uid": "other"}, "one prompt and one policy version"),
        (1, {"response_index": 2}, "numbered 0, 1, ..."),
        (3, {"group": 0, "prompt_uid": "p0", "response_index": 2}, "rows are not together"),
        (0, {"token_ids": [], "logprobs": []}, "0 tokens"),
        (0, {"text": None}, "must not hold nulls"),
        (0, {"interruptions": None}, "must not hold nulls"),
        (1, {"outcome": "verifier_lost"}, "group 0, response 1: the outcome is verifier_lost"),
        (1, {"outcome": "lucky"}, "group 0, response 1: the outcome is lucky"),
    ],
)
def test_anything_but_whole_groups_is_refused(
    row: int, change: dict[str, Any], message: str
) -> None:
    wrong = rows()
    wrong[row] |= change
    with pytest.raises(TrajectoryError, match=message):
        decode_groups(write_table(pa.Table.from_pylist(wrong, schema=SCHEMA)))


@given(st.lists(groups, min_size=1, max_size=4))
def test_the_rewards_of_a_group_are_means(written: list[TrajectoryGroup]) -> None:
    read = check_groups(read_trajectories(encode_groups(written)))
    for group, expected in zip(read, written, strict=True):
        size = len(expected.responses)
        assert group.correct == expected.correct
        mean = sum(response.reward for response in expected.responses) / size
        assert group.mean_reward == pytest.approx(mean, rel=1e-6, abs=1e-6)
        names = {name for response in expected.responses for name in response.reward_parts}
        assert group.reward_parts == {
            name: pytest.approx(
                sum(response.reward_parts.get(name, 0.0) for response in expected.responses) / size
            )
            for name in names
        }


def test_trajectories_of_earlier_versions_are_read() -> None:
    """Their rewards are 0 or 1: a response is correct if its reward is 1."""
    earlier = pa.schema(list(SCHEMA)[:-9])
    assert earlier.names[-1] == "text"
    stored = [row | {"reward": float(number % 2)} for number, row in enumerate(rows())]
    read = decode_groups(write_table(pa.Table.from_pylist(stored, schema=earlier)))
    for group in read:
        assert [response.correct for response in group.responses] == [False, True]
        assert [response.reward_parts for response in group.responses] == [
            {"answer": 0.0},
            {"answer": 1.0},
        ]
        assert all(response.interruptions == {} for response in group.responses)


@pytest.mark.parametrize(
    ("columns", "last", "answer"),
    [
        (-7, "reward_parts", None),
        (-6, "answer", "x"),
        (-5, "interruptions", "x"),
        (-3, "repeated", "x"),
    ],
)
def test_columns_that_earlier_versions_did_not_store_are_empty(
    columns: int, last: str, answer: str | None
) -> None:
    earlier = pa.schema(list(SCHEMA)[:columns])
    assert earlier.names[-1] == last
    for group in decode_groups(write_table(pa.Table.from_pylist(rows(), schema=earlier))):
        assert [response.answer for response in group.responses] == [answer, answer]
        assert all(response.interruptions == {} for response in group.responses)
        assert all(response.outcome == Outcome.SCORED for response in group.responses)
        assert {(response.status, response.extracted) for response in group.responses} == {
            (None, None)
        }


def test_earlier_responses_have_no_reason_of_a_failure() -> None:
    earlier = pa.schema(list(SCHEMA)[:-1])
    for group in decode_groups(write_table(pa.Table.from_pylist(rows(), schema=earlier))):
        assert [response.extracted for response in group.responses] == ["x", "x"]
        assert [response.failure for response in group.responses] == [None, None]


def test_the_outcome_of_an_earlier_response_follows_from_its_reward() -> None:
    stored = rows()
    stored[1]["reward_parts"] = {"answer": 0.0, "failed": 1.0}
    earlier = pa.schema(list(SCHEMA)[:-5])
    first, second = decode_groups(write_table(pa.Table.from_pylist(stored, schema=earlier)))
    assert [response.outcome for response in first.responses] == [Outcome.SCORED, Outcome.CRASHED]
    assert [response.outcome for response in second.responses] == [Outcome.SCORED] * 2


def test_outcomes_repetitions_and_cut_responses_are_counted() -> None:
    stored = rows()
    stored[0] |= {"outcome": "timed_out", "repeated": {"verifier_lost": 2}}
    stored[1] |= {"finish_reason": "length", "repeated": {"verifier_lost": 1, "engine_lost": 1}}
    first, second = check_groups(pa.Table.from_pylist(stored, schema=SCHEMA))
    assert first.outcomes == {"timed_out": 1, "scored": 1}
    assert first.repeated == {"verifier_lost": 3, "engine_lost": 1}
    assert (first.cut_off, second.cut_off) == (1, 0)
    assert (second.outcomes, second.repeated) == ({"scored": 2}, {})


def test_other_formats_are_refused() -> None:
    with pytest.raises(TrajectoryError, match="not an Arrow IPC stream"):
        decode_groups(b"PAR1")
    with pytest.raises(TrajectoryError, match="columns must be exactly"):
        decode_groups(write_table(pa.table({"a": [1]})))


def test_storage_step_log_probs_survive() -> None:
    scores = {7: [[-1.0, -2.0], [-0.5]], 9: [[-3.0]]}
    assert read_proximal(encode_proximal(scores)).to_pylist() == [
        {"group_id": group_id, "response_index": index, "logprobs": values}
        for group_id, responses in scores.items()
        for index, values in enumerate(responses)
    ]
