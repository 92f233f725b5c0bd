"""Makes the trainer's batches out of groups that no run has stored."""

from __future__ import annotations

from benchmarks.trl_steps import Group
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import ManifestMember
from services.trainer.data import Batch, collate

WINDOW = (0.125, 0.5)
"""[c2, c3] of the step, which affects nothing but a metric."""


def batch_of(groups: list[Group]) -> Batch:
    """Returns the batch of these groups, as if they were generated for step 1."""
    stored = [
        TrajectoryGroup(
            str(index),
            group.prompt,
            1,
            [
                TrajectoryResponse(
                    response.tokens,
                    response.logprobs,
                    response.reward,
                    "stop",
                    "",
                    response.reward > 0,
                )
                for response in group.responses
            ],
        )
        for index, group in enumerate(groups)
    ]
    return collate(_members_of(groups), table_of(stored))


def _members_of(groups: list[Group]) -> list[ManifestMember]:
    return [
        ManifestMember(
            group_id=index,
            source="fresh",
            prompt_uid=str(index),
            step=1,
            policy_version=1,
            correct=sum(response.reward > 0 for response in group.responses),
            size=len(group.responses),
            tokens=sum(len(response.tokens) for response in group.responses),
            object_key="",
            object_digest="",
            row_start=0,
            row_count=len(group.responses),
        )
        for index, group in enumerate(groups)
    ]
