"""Chooses the responses of earlier steps that join the fresh groups of a batch.

The rules are `bapo_core.response_replay`'s. The cache of a prompt is the responses in its committed
groups, so a rewind has nothing to undo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.orm import Session, aliased

from bapo_core.config import RunConfig
from bapo_core.response_replay import StoredResponse, choose_responses, receives_responses
from bapo_core.seeding import derive_rng
from bapo_core.types import GroupSummary
from services.buffer.samplers import count_revisited
from services.buffer.stored_groups import SUMMARY_COLUMNS
from services.buffer.tables import PromptRow, RolloutGroup, Run


def choose_replayed(
    session: Session,
    run: Run,
    config: RunConfig,
    step: int,
    fresh: Sequence[GroupSummary],
) -> dict[int, list[StoredResponse]]:
    """Returns the responses that join each fresh group of a step, by the group's id."""
    settings = config.response_replay
    if not settings.enabled:
        return {}
    # `fresh` has all groups of the step in the order of their draw, the revisited ones first.
    first = count_revisited(session, run, config, step) if settings.groups == "revisited" else 0
    groups = [
        group
        for rank, group in enumerate(fresh)
        if receives_responses(group, settings, revisited=rank < first)
    ]
    uids = [group.prompt_uid for group in groups]
    cache = _read_cache(session, run, config, step, uids)
    chosen = {
        group.group_id: choose_responses(
            cache.get(group.prompt_uid, []),
            settings,
            derive_rng(config.seed, "responses", step, group.prompt_uid),
        )
        for group in groups
    }
    return {group_id: responses for group_id, responses in chosen.items() if responses}


def _read_cache(
    session: Session, run: Run, config: RunConfig, step: int, uids: Sequence[str]
) -> dict[str, list[StoredResponse]]:
    """Returns responses to these prompts in groups of steps before `step`, oldest first.

    Of each prompt, only the newest groups are read that `choose_responses` can choose from: a
    prompt has the more groups, the longer the run.
    """
    settings = config.response_replay
    stored = aliased(RolloutGroup)
    usable: list[ColumnElement[bool]] = [stored.responses.is_not(None)]
    groups = math.ceil(settings.cache / config.rollout.group_size)
    if settings.only_correct:
        usable.append(stored.correct > 0)
        groups = settings.cache  # One correct response in each, in the worst case.
    newest = (
        select(stored.id)
        .where(
            stored.run_id == run.id,
            stored.prompt_id == PromptRow.id,
            stored.step < step,
            stored.kind != "evaluation",
            *usable,
        )
        .order_by(stored.step.desc(), stored.kind.desc())
        .limit(groups)
        .correlate(PromptRow)
        .lateral()
    )
    rows = session.execute(
        select(*SUMMARY_COLUMNS, RolloutGroup.responses)
        .select_from(PromptRow)
        .join(newest, true())
        .join(RolloutGroup, RolloutGroup.id == newest.c.id)
        .where(PromptRow.dataset == run.train_dataset, PromptRow.uid.in_(uids))
        .order_by(RolloutGroup.step, RolloutGroup.kind)
    )
    cache: dict[str, list[StoredResponse]] = {}
    for *summary, responses in rows:
        group = GroupSummary(*summary)
        columns = (responses["rewards"], responses["correct"], responses["logprobs"])
        cache.setdefault(group.prompt_uid, []).extend(
            StoredResponse(group, row, *values)
            for row, values in enumerate(zip(*columns, strict=True))
        )
    return cache
