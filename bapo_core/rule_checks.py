"""Checks what the batch rule of a plug-in returns, before it is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from bapo_core.buffers import BufferChange
from bapo_core.composition import Composition, StepState
from bapo_core.config import RunConfig
from bapo_core.errors import ConfigError
from bapo_core.types import BatchMember, GroupSummary, Source

_CHANGES = 'return {"hard": [BufferChange, ...], "high_quality": [BufferChange, ...]}'


def check_composition(config: RunConfig, state: StepState, composition: Any) -> Composition:
    """Returns a composition with the counts of its members. Raises `ConfigError` for a wrong one.

    A batch has groups of the state alone, each of them once, and at most the capacity of them;
    replayed responses, which are parts of groups, aside.
    """
    if not isinstance(composition, Composition):
        raise ConfigError(
            f"compose returned {composition!r}; return a bapo_core.algorithm.Composition"
        )
    members = composition.batch.members
    cached = (response.group for responses in state.caches.values() for response in responses)
    known = {group.group_id for group in (*state.fresh, *state.reevaluated, *state.high, *cached)}
    unknown = {member.group.group_id for member in members} - known
    if unknown:
        raise ConfigError(f"compose returned group {min(unknown)}, which is none of the state's")
    whole = [member for member in members if not _is_response(member)]
    if len({member.group.group_id for member in whole}) < len(whole):
        raise ConfigError("compose returned a batch that has a group twice")
    if len(whole) > config.batch_capacity:
        raise ConfigError(
            f"compose returned {len(whole)} groups, but the capacity of a batch is "
            f"{config.batch_capacity}"
        )
    counts = Counter(member.source for member in whole)
    batch = replace(composition.batch, counts={source: counts[source] for source in Source})
    return replace(composition, batch=batch)


def _is_response(member: BatchMember) -> bool:
    return member.source is Source.REPLAYED and member.rows is not None


def check_changes(changes: Any) -> None:
    """Raises `ConfigError` unless `changes` are changes of the buffers."""
    if not isinstance(changes, Mapping) or not changes.keys() <= {"hard", "high_quality"}:
        raise ConfigError(f"settle returned {changes!r}; {_CHANGES}")
    for buffer, in_order in changes.items():
        listed = isinstance(in_order, Sequence)
        if not listed or not all(isinstance(change, BufferChange) for change in in_order):
            raise ConfigError(f"settle returned {in_order!r} for {buffer!r}; {_CHANGES}")
        admitted = [group.group_id for change in in_order for group in change.admitted]
        if len(set(admitted)) < len(admitted):
            raise ConfigError(f"settle admitted a group twice to the buffer {buffer!r}")
        reasons = [reason for change in in_order for _, reason in change.evicted]
        if not all(isinstance(reason, StrEnum) for reason in reasons):
            raise ConfigError("settle evicted a group for a reason that is no member of a StrEnum")


def check_drawn(hard: Sequence[GroupSummary], drawn: Sequence[GroupSummary]) -> None:
    """Raises `ConfigError` unless `drawn` are entries of `hard` with different prompts."""
    uids = [entry.prompt_uid for entry in drawn]
    if len(set(uids)) < len(uids) or not set(drawn) <= set(hard):
        raise ConfigError(
            "draw_reevaluated must return entries of the hard buffer with different prompts"
        )
