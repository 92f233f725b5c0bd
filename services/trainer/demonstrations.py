"""Encodes demonstrations, the texts of a teacher, as rows of trajectories in the model's tokens."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import ManifestMember
from services.model.conversation import load_tokenizer


class DemonstrationEncoder:
    """Encodes demonstrations, which end as a response does. The tokenizer is loaded when needed."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        """directory: directory of the initial model."""
        self._config, self._directory = config, directory

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._directory)

    def encode(self, member: ManifestMember, prompt_token_ids: list[int]) -> pa.Table:
        """Returns the demonstration of `member` as a row of trajectories.

        Its log-probs are 0, because it counts as certain under its behaviour policy. Raises
        `BapoError` for one that is longer than `rollout.max_response_tokens`.
        """
        assert member.demonstration is not None
        tokens = self._tokenizer(member.demonstration, add_special_tokens=False)["input_ids"]
        tokens = [*tokens, self._tokenizer.eos_token_id]
        longest = self._config.rollout.max_response_tokens
        if len(tokens) > longest:
            raise BapoError(
                f"the demonstration of prompt {member.prompt_uid!r} has {len(tokens)} tokens, more "
                f"than rollout.max_response_tokens ({longest}); raise it in a new run, or leave "
                "the demonstration out of the data"
            )
        reward = self._config.reward.correct
        response = TrajectoryResponse(
            tokens, [0.0] * len(tokens), reward, "stop", member.demonstration, correct=True
        )
        group = TrajectoryGroup(
            member.prompt_uid, prompt_token_ids, member.policy_version, [response]
        )
        return table_of([group])
