"""Batches built from Arrow columns equal those built response by response, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.buffer.api.trajectories import (
    TrajectoryGroup,
    TrajectoryResponse,
    encode_groups,
    encode_proximal,
    table_of,
)
from services.buffer.api.wire import ManifestMember
from services.common.objectstore import ObjectStore
from services.trainer.data import Batch, TrajectoryReader, collate, split_by_group

TENSORS = (
    "member",
    "group",
    "tokens",
    "prompt_lengths",
    "lengths",
    "behavior_logprobs",
    "mask",
    "rewards",
)


def collate_by_response(
    groups: Sequence[TrajectoryGroup], joins: Sequence[bool] | None = None
) -> dict[str, torch.Tensor]:
    """Builds the tensors of a batch one response at a time: slow, and easy to follow.

    joins: whether each one joins the group of the one before.
    """
    joins = joins or [False] * len(groups)
    responses = [(index, response) for index, g in enumerate(groups) for response in g.responses]
    sequences = [
        [*groups[index].prompt_token_ids, *response.token_ids] for index, response in responses
    ]
    width = max((len(sequence) for sequence in sequences), default=1)
    longest = max((len(response.token_ids) for _, response in responses), default=1)
    tokens = torch.zeros(len(responses), width, dtype=torch.long)
    behavior_logprobs = torch.zeros(len(responses), longest)
    mask = torch.zeros(len(responses), longest, dtype=torch.bool)
    for row, ((_, response), sequence) in enumerate(zip(responses, sequences, strict=True)):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        count = len(response.token_ids)
        behavior_logprobs[row, :count] = torch.tensor(response.logprobs)
        mask[row, :count] = True
    prompt_lengths = [len(groups[index].prompt_token_ids) for index, _ in responses]
    rewards: list[list[float]] = []
    compared = []
    for group, joined in zip(groups, joins, strict=True):
        if not joined:
            rewards.append([])
        rewards[-1] += [response.reward for response in group.responses]
        compared += [len(rewards) - 1] * len(group.responses)
    most = max((len(of_group) for of_group in rewards), default=2)
    padded = [of_group + [0.0] * (max(most, 2) - len(of_group)) for of_group in rewards]
    return {
        "member": torch.tensor([index for index, _ in responses], dtype=torch.long),
        "group": torch.tensor(compared, dtype=torch.long),
        "tokens": tokens,
        "prompt_lengths": torch.tensor(prompt_lengths, dtype=torch.long),
        "lengths": torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long),
        "behavior_logprobs": behavior_logprobs,
        "mask": mask,
        "rewards": torch.tensor(padded).reshape(len(rewards), max(most, 2)),
    }


def assert_same(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    for name in TENSORS:
        tensor = getattr(batch, name)
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@st.composite
def batches(draw: st.DrawFn) -> list[TrajectoryGroup]:
    """Draws ragged groups; log-probs are float32, as they are stored."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def response() -> TrajectoryResponse:
        length = int(rng.integers(1, 9))
        logprobs = (-rng.exponential(2.0, length)).astype(np.float32).tolist()
        ids = rng.integers(0, 2**31 - 1, length).tolist()
        return TrajectoryResponse(ids, logprobs, float(rng.integers(2)), "stop", "", correct=False)

    return [
        TrajectoryGroup(
            str(index),
            rng.integers(0, 2**31 - 1, int(rng.integers(0, 6))).tolist(),
            1,
            [response() for _ in range(int(rng.integers(1, 5)))],
        )
        for index in range(draw(st.integers(0, 5)))
    ]


@given(batches(), st.data())
def test_columns_give_the_same_tensors_as_responses_one_by_one(
    groups: list[TrajectoryGroup], data: Any
) -> None:
    joins = [index > 0 and data.draw(st.booleans()) for index in range(len(groups))]
    members = [
        member(index, len(group.responses), "", 0, None).model_copy(
            update={"joins_previous": joined}
        )
        for index, (group, joined) in enumerate(zip(groups, joins, strict=True))
    ]
    batch = collate(members, table_of(groups))
    assert_same(batch, collate_by_response(groups, joins))
    assert batch.row_rewards.tolist() == [
        response.reward for group in groups for response in group.responses
    ]
    assert int(batch.sizes.sum()) == len(batch.lengths)


def test_a_table_with_other_rows_than_the_members_is_refused() -> None:
    response = TrajectoryResponse([1], [-1.0], 0.0, "stop", "", correct=False)
    table = table_of([TrajectoryGroup("0", [1], 1, [response] * 3)])
    with pytest.raises(ValueError, match="members have 2 rows, but the table 3"):
        collate([member(0, 2, "", 0, None)], table)


class MemoryStore:
    """An object store of bytes by key, which counts its reads."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads = 0

    def put(self, data: bytes) -> str:
        key = hashlib.sha256(data).hexdigest()
        self.objects[key] = data
        return key

    def get(self, key: str, digest: str) -> bytes:
        assert digest == key
        self.reads += 1
        return self.objects[key]


def member(index: int, size: int, key: str, row: int, proximal: str | None) -> ManifestMember:
    return ManifestMember(
        group_id=index,
        source="fresh",
        prompt_uid=str(index),
        step=1,
        policy_version=1,
        correct=0,
        size=size,
        object_key=key,
        object_digest=key,
        row_start=row,
        row_count=size,
        proximal_key=proximal,
        proximal_digest=proximal,
    )


@settings(max_examples=30)
@given(batches(), st.data())
def test_a_batch_takes_its_groups_from_any_objects_in_the_manifests_order(
    groups: list[TrajectoryGroup], data: Any
) -> None:
    """Groups are spread over two objects; some have recorded log-probs of the storage step."""
    store = MemoryStore()
    recorded = {
        index: [[value - 0.5 for value in response.logprobs] for response in group.responses]
        for index, group in enumerate(groups)
        if index % 3 != 1
    }
    proximal = store.put(encode_proximal(recorded))
    members: dict[int, ManifestMember] = {}
    for stored in (range(0, len(groups), 2), range(1, len(groups), 2)):
        key = store.put(encode_groups([groups[index] for index in stored]))
        row = 0
        for index in stored:
            size = len(groups[index].responses)
            storage_key = proximal if index in recorded else None
            members[index] = member(index, size, key, row, storage_key)
            row += size
    order = data.draw(st.permutations(range(len(groups))))
    reader = TrajectoryReader(cast(ObjectStore, store))
    chosen = {
        index: sorted(data.draw(st.sets(st.integers(0, len(group.responses) - 1), min_size=1)))
        for index, group in enumerate(groups)
    }
    parts = [members[index].model_copy(update={"rows": chosen[index]}) for index in order]
    assert_same(
        reader.batch(parts),
        collate_by_response(
            [
                replace(
                    groups[index], responses=[groups[index].responses[n] for n in chosen[index]]
                )
                for index in order
            ]
        ),
    )
    batch = reader.batch([members[index] for index in order], with_storage=True)
    assert_same(batch, collate_by_response([groups[index] for index in order]))
    assert batch.storage_logprobs is not None
    assert bool(batch.storage_logprobs.isnan()[~batch.mask].all())
    for index, rows in zip(order, split_by_group(batch, batch.storage_logprobs), strict=True):
        expected = recorded.get(index)
        if expected is None:
            assert all(np.isnan(values).all() for values in rows)
        else:
            stored_values = [np.float32(values).tolist() for values in expected]
            assert rows == stored_values


def test_a_part_of_a_group_has_no_log_probs_of_the_storage_step() -> None:
    """A fresh group that a demonstration has joined may have recorded ones of all its responses."""
    store = MemoryStore()
    responses = [
        TrajectoryResponse([1] * length, [-1.0] * length, 1.0, "stop", "", correct=True)
        for length in (3, 1)
    ]
    key = store.put(encode_groups([TrajectoryGroup("0", [1], 1, responses)]))
    proximal = store.put(encode_proximal({0: [[-1.0, -1.0, -1.0], [-2.0]]}))
    part = member(0, 2, key, 0, proximal).model_copy(update={"rows": [1]})
    batch = TrajectoryReader(cast(ObjectStore, store)).batch([part], with_storage=True)
    assert batch.storage_logprobs is not None
    assert batch.storage_logprobs.shape == (1, 1)
    assert bool(batch.storage_logprobs.isnan().all())


def test_an_object_is_read_once_while_it_is_among_the_recent_ones() -> None:
    store = MemoryStore()
    response = TrajectoryResponse([1, 2], [-1.0, -2.0], 1.0, "stop", "", correct=True)
    keys = [
        store.put(encode_groups([TrajectoryGroup(str(n), [n], 1, [response])])) for n in range(3)
    ]
    reader = TrajectoryReader(cast(ObjectStore, store), keep=2)
    for index, reads in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        reader.batch([member(index, 1, keys[index], 0, None)])
        assert store.reads == reads


def test_a_batch_reads_each_of_its_objects_once() -> None:
    """Its groups lie in more objects than stay in memory, and in another order."""
    store = MemoryStore()
    response = TrajectoryResponse([1, 2], [-1.0, -2.0], 1.0, "stop", "", correct=True)
    keys = [
        store.put(
            encode_groups([TrajectoryGroup(str(n + 3 * k), [n], 1, [response]) for k in range(2)])
        )
        for n in range(3)
    ]
    members = [member(n + 3 * k, 1, keys[n], k, None) for k in range(2) for n in range(3)]
    batch = TrajectoryReader(cast(ObjectStore, store), keep=1).batch(members)
    assert store.reads == 3
    assert batch.tokens[:, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_recorded_log_probs_of_other_responses_are_refused() -> None:
    store = MemoryStore()
    response = TrajectoryResponse([1, 2], [-1.0, -2.0], 1.0, "stop", "", correct=True)
    key = store.put(encode_groups([TrajectoryGroup("0", [1], 1, [response])]))
    proximal = store.put(encode_proximal({0: [[-1.0]]}))
    with pytest.raises(ValueError, match=r"1 log-probs of the storage step .* for 2 tokens"):
        TrajectoryReader(cast(ObjectStore, store)).batch(
            [member(0, 1, key, 0, proximal)], with_storage=True
        )
