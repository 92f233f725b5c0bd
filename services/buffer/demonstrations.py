"""Chooses the fresh groups that demonstrations join, and the prompts of supervised updates.

A demonstration is in the payload of its prompt. Both choices follow from committed state, so a
rewind has nothing to undo.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from bapo_core.config import RunConfig
from bapo_core.tasks.base import DEMONSTRATION
from bapo_core.types import GroupSummary
from services.buffer.buffers import buffer_as_of
from services.buffer.tables import PromptRow, Run

DEMONSTRATION_TEXT = PromptRow.payload[DEMONSTRATION].astext
"""The text of a prompt's demonstration, null without one."""


def demonstration_joins(config: RunConfig, correct: int) -> bool:
    """Returns whether a demonstration joins a fresh group with this many correct responses."""
    return config.demonstrations.join == "all" or (
        config.demonstrations.join == "unsolved" and correct == 0
    )


def demonstrated_groups(
    session: Session, run: Run, config: RunConfig, fresh: Sequence[GroupSummary]
) -> set[int]:
    """Returns the ids of the fresh groups that a demonstration joins."""
    candidates = [group for group in fresh if demonstration_joins(config, group.correct)]
    if not candidates:
        return set()
    uids = _with_demonstration(session, run, [group.prompt_uid for group in candidates])
    return {group.group_id for group in candidates if group.prompt_uid in uids}


def supervised_entries(
    session: Session, run: Run, config: RunConfig, step: int
) -> list[GroupSummary]:
    """Returns the hard entries whose demonstrations `step` has a supervised update on (ReLIFT).

    They are the newest `demonstrations.supervise_every` entries without a correct response; none
    as long as there are fewer.
    """
    count = config.demonstrations.supervise_every
    if not count:
        return []
    entries = buffer_as_of(session, run, "hard", step - 1)
    unsolved = [entry for entry in entries if entry.correct == 0]
    uids = _with_demonstration(session, run, [entry.prompt_uid for entry in unsolved])
    due = [entry for entry in unsolved if entry.prompt_uid in uids]
    return due[-count:] if len(due) >= count else []


def _with_demonstration(session: Session, run: Run, uids: Sequence[str]) -> set[str]:
    """Returns those of the prompts that have a demonstration."""
    return set(
        session.scalars(
            select(PromptRow.uid).where(
                PromptRow.dataset == run.train_dataset,
                PromptRow.uid.in_(uids),
                DEMONSTRATION_TEXT.is_not(None),
            )
        )
    )
