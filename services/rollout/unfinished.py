"""Responses that have begun and whose groups are not delivered, so that they can be continued."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

from services.rollout.api.wire import FinishReason, GeneratedTokens, StartedResponse


@dataclass(slots=True)
class UnfinishedResponse:
    """The tokens of a response so far, in 8 bytes each: there may be millions."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    finish_reason: FinishReason | None = None
    versions: dict[int, int] = field(default_factory=dict)
    """Policy version that sampled the tokens, by the index of the first one that it sampled."""

    def runs(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yields (index of the first token, end, policy version) for the tokens from `start` on."""
        for first, end in pairwise([*self.versions, len(self.token_ids)]):
            if start < end:
                yield max(first, start), end, self.versions[first]


class UnfinishedGroups:
    """The responses of a request by prompt, from their first tokens on until `discard`."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._groups: dict[int, list[UnfinishedResponse]] = {}
        self.lost: Counter[int] = Counter()
        """How often a replica was lost or failed before it had answered a prompt, by index."""
        self.voided = 0
        """How often tokens have become void, which were in the journal then."""

    def add(self, tokens: GeneratedTokens) -> None:
        """Appends tokens to a response.

        Raises `ValueError` unless they begin where the response ends, and it has not finished.
        """
        if not 0 <= tokens.response < self._group_size:
            raise ValueError(f"response {tokens.response} is not in a group of {self._group_size}")
        if len(tokens.token_ids) != len(tokens.logprobs):
            raise ValueError(
                f"{len(tokens.token_ids)} tokens have {len(tokens.logprobs)} log-probs"
            )
        if not all(0 <= token < 1 << 31 for token in tokens.token_ids):
            raise ValueError("a token id is negative or has more than 31 bits")
        if not all(map(isfinite, tokens.logprobs)):
            raise ValueError("a log-prob is not finite")
        group = self._groups.get(tokens.index)
        if group is None:
            group = [UnfinishedResponse() for _ in range(self._group_size)]
        response = group[tokens.response]
        if tokens.start != len(response.token_ids) or response.finish_reason is not None:
            raise ValueError(
                f"tokens from {tokens.start} on do not continue response {tokens.response} to "
                f"prompt {tokens.index}, which has {len(response.token_ids)} tokens"
            )
        self._groups[tokens.index] = group
        last_version = next(reversed(response.versions.values()), None)
        if tokens.token_ids and tokens.policy_version != last_version:
            response.versions[tokens.start] = tokens.policy_version
        response.token_ids.extend(tokens.token_ids)
        response.logprobs.extend(tokens.logprobs)
        response.finish_reason = tokens.finish_reason

    def started(self, index: int) -> list[StartedResponse]:
        """Returns the responses to a prompt; none if not a single token was sampled."""
        return [
            StartedResponse(
                token_ids=response.token_ids.tolist(),
                logprobs=response.logprobs.tolist(),
                finish_reason=response.finish_reason,
            )
            for response in self._groups.get(index, [])
        ]

    def open_lengths(self, index: int) -> dict[int, int]:
        """Returns the number of tokens of each response to a prompt that has not ended, by number.

        A response that has not begun has 0.
        """
        group = self._groups.get(index, [UnfinishedResponse() for _ in range(self._group_size)])
        return {
            number: len(response.token_ids)
            for number, response in enumerate(group)
            if response.finish_reason is None
        }

    def interruptions(self, index: int, version: int) -> list[dict[int, int]]:
        """Returns the interruptions of each response to a prompt, as in `TrajectoryResponse`.

        version: the policy version of the group. Returns an empty list if no token was streamed.
        """
        return [
            {
                first: sampled_by
                for first, sampled_by in response.versions.items()
                if (first, sampled_by) != (0, version)
            }
            for response in self._groups.get(index, [])
        ]

    def discard(self, indices: Iterable[int]) -> None:
        """Forgets the responses to prompts, because their groups are delivered."""
        for index in indices:
            self._groups.pop(index, None)

    def void(self, index: int) -> None:
        """Forgets the responses to a prompt, because its tokens must not be used."""
        self.voided += 1
        self.discard([index])

    def keep(self, indices: Collection[int]) -> None:
        """Forgets the responses to all prompts but these."""
        self.discard([index for index in self._groups if index not in indices])

    def __iter__(self) -> Iterator[tuple[int, int, UnfinishedResponse]]:
        """Yields (prompt, response, its tokens) for responses that have tokens."""
        for index, group in self._groups.items():
            for number, response in enumerate(group):
                if response.token_ids:
                    yield index, number, response

    @property
    def token_count(self) -> int:
        """Number of tokens of all responses."""
        return sum(len(response.token_ids) for _, _, response in self)
