"""The groups that benchmarks make up are those that the buffer service takes."""

from __future__ import annotations

import numpy as np

from benchmarks.buffer import SIZE, trajectories
from services.buffer.api.trajectories import decode_groups


def test_made_up_groups_are_complete() -> None:
    uids = ["a", "b", "c"]
    groups = decode_groups(trajectories(uids, 3, 4, np.random.default_rng(0)))
    assert [group.prompt_uid for group in groups] == uids
    for group in groups:
        assert group.policy_version == 3
        assert [len(response.token_ids) for response in group.responses] == [4] * SIZE
        assert all(response.interruptions == {} for response in group.responses)
