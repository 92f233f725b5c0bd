"""Algorithm 1 of arXiv 2602.20722, as pure functions of the state of a step.

`compose` makes the batch of a step from the groups of the step and the buffers before it, with the
reason for each choice; `settle` returns what the commit of the step changes in the buffers; and
`draw_reevaluated` chooses the hard prompts that are answered again. Whoever calls them reads the
state and records the results.

The three are a batch rule, `algorithm1`, which `batch.rule` selects. Other distributions add batch
rules by the entry-point group `bapo.batch_rules`, which names a `BatchRule`
(docs/adding-a-method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bapo_core.batch import build_batch
from bapo_core.buffers import (
    BufferChange,
    EvictionReason,
    admit_hard,
    admit_high,
    choose_reevaluated,
    eligible_high,
    evict_solved,
    find_effective,
    promoted,
)
from bapo_core.composition import Composition, Decision, Decisions, StepState
from bapo_core.config import RunConfig
from bapo_core.config.batches import BATCH_RULE_ENTRY_POINTS
from bapo_core.errors import ConfigError
from bapo_core.filters import gaussian_filter, range_filter, uniform_filter
from bapo_core.plug_ins import find, report_failures
from bapo_core.reasons import ComposedBatch, explain_composition
from bapo_core.response_replay import (
    StoredResponse,
    add_responses,
    becomes_mixed,
    choose_responses,
    receives_responses,
    without_first,
)
from bapo_core.rule_checks import check_changes, check_composition, check_drawn
from bapo_core.seeding import derive_rng
from bapo_core.thresholds import replay_window, running_reward
from bapo_core.types import GroupSummary, Source

__all__ = [
    "BATCH_RULES",
    "BatchRule",
    "Composition",
    "Decision",
    "Decisions",
    "StepState",
    "compose",
    "demonstration_joins",
    "draw_reevaluated",
    "find_candidates",
    "get_batch_rule",
    "receives_replayed",
    "settle",
]

BufferName = Literal["hard", "high_quality"]
BufferChanges = Mapping[BufferName, Sequence[BufferChange]]
"""Changes of each buffer at a commit, in the order in which they are applied."""


# ---- the batch of a step ------------------------------------------------------------------------


def compose(
    config: RunConfig, state: StepState, *, left_out: Mapping[int, str] | None = None
) -> Composition:
    """Composes the batch of X1 (filtered fresh), X2 (promoted) and X3 (replayed).

    Replayed responses and demonstrations join the fresh groups of their prompts.

    left_out: for a batch rule, why it does not replay entries of B_high that Algorithm 1 might
    have, by the group's id.
    """
    left_out = left_out or {}
    r_tot = _compute_r_tot(config, state)
    window = _compute_window(config, r_tot)
    selects_mixed = config.replays_all_mixed
    responses = _choose_responses(config, state)
    joined = {group.group_id for group in state.fresh if _is_joined(config, state, group)}
    x1 = _filter_fresh(config, state, responses, joined)
    x2 = _promote(config, state)
    candidates = [
        entry for entry in _find_candidates(config, state, window) if entry.group_id not in left_out
    ]
    batch = build_batch(
        x1,
        x2,
        candidates,
        capacity=config.batch_capacity,
        window=window,
        selects_mixed=selects_mixed,
        c1=config.reevaluate.c1 if config.reevaluate.rule == "paper" else None,
        rng=derive_rng(config.seed, "batch", state.step),
        dedup=config.batch.dedup,
    )
    members = [
        without_first(member, 1)
        if member.source is Source.FRESH and member.group.group_id in joined
        else member
        for member in batch.members
    ]
    batch = replace(batch, members=members)
    if config.response_replay.groups != "off":
        batch = add_responses(batch, responses, config.response_replay)
    composed = ComposedBatch(batch, x1, x2, candidates, left_out)
    decisions = explain_composition(config, state, composed)
    return Composition(batch, r_tot, _choose_supervised(config, state), decisions)


def find_candidates(config: RunConfig, state: StepState) -> list[GroupSummary]:
    """Returns the entries of B_high that X3 is drawn from (Eq. 7), oldest first.

    They are in the replay window of the step and recent; none in a step without replay. Of a prompt
    that is in the batch already, no entry is drawn.
    """
    return _find_candidates(config, state, _compute_window(config, _compute_r_tot(config, state)))


def _find_candidates(
    config: RunConfig, state: StepState, window: tuple[float, float]
) -> list[GroupSummary]:
    if not config.replays_at(state.step):
        return []
    max_age = config.high_quality_buffer.max_age
    limits = None if config.replays_all_mixed else window
    candidates = eligible_high(state.high, step=state.step, window=limits, max_age=max_age)
    if config.replay.select == "effective_sample_size":
        candidates = find_effective(
            candidates,
            step=state.step,
            decay=state.ess_decay,
            min_ess_fraction=config.replay.min_ess_fraction,
        )
    return candidates


def _compute_r_tot(config: RunConfig, state: StepState) -> float:
    settings = config.replay_window
    return running_reward(
        settings.r_tot,
        state.fresh,
        previous=state.r_tot_before,
        buffer=[*state.hard, *state.high],
        ema_decay=settings.ema_decay,
    )


def _compute_window(config: RunConfig, r_tot: float) -> tuple[float, float]:
    """Returns the window [c2, c3]: groups with an accuracy in it are stored and replayed.

    Where all mixed groups may be replayed, no window chooses; it returns the accuracies that mixed
    groups have while rewards are 1 and 0.
    """
    if config.replays_all_mixed:
        size = config.rollout.group_size
        return 1 / size, (size - 1) / size
    settings = config.replay_window
    return replay_window(r_tot, settings.c2_range, settings.c3_range, settings.direction)


def _filter_fresh(
    config: RunConfig,
    state: StepState,
    responses: Mapping[int, Sequence[StoredResponse]],
    joined: Collection[int],
) -> list[GroupSummary]:
    """Applies the online filter (A.3) to the fresh groups; what it keeps is X1.

    Under `range`, these are the groups that are mixed, or become so by the responses that join
    them. responses: replayed responses by group id. joined: ids of the groups that a demonstration
    joins.
    """
    fresh, settings = state.fresh, config.fresh
    rng = derive_rng(config.seed, "filter", state.step)
    match settings.filter:
        case "range":
            replay = config.response_replay
            compared = {} if replay.groups == "off" or replay.advantages == "split" else responses
            kept = {group.group_id for group in range_filter(fresh)}
            kept |= {
                group.group_id
                for group in fresh
                if becomes_mixed(
                    group,
                    compared.get(group.group_id, ()),
                    demonstrated=group.group_id in joined,
                )
            }
            return [group for group in fresh if group.group_id in kept]
        case "gaussian":
            mean, sigma = settings.gaussian_mean, settings.gaussian_sigma
            return gaussian_filter(fresh, mean=mean, sigma=sigma, rng=rng)
        case "uniform":
            return uniform_filter(fresh, fraction=settings.uniform_fraction, rng=rng)
        case "none":
            return list(fresh)


def _promote(config: RunConfig, state: StepState) -> list[GroupSummary]:
    """Returns the re-evaluated groups that enter X2 (Eq. 6)."""
    # The newest entry of a prompt is the one that is drawn.
    stored = {entry.prompt_uid: entry for entry in state.hard}
    settings = config.reevaluate
    return [
        group
        for group in state.reevaluated
        if promoted(stored[group.prompt_uid], group, rule=settings.rule, c1=settings.c1)
    ]


def receives_replayed(
    config: RunConfig, fresh: Sequence[GroupSummary], revisited: int
) -> list[GroupSummary]:
    """Returns the fresh groups that responses of earlier steps may join.

    revisited: number of groups, the first ones, whose prompts were drawn for their past successes.
    """
    settings = config.response_replay
    if settings.groups == "off":
        return []
    return [
        group
        for rank, group in enumerate(fresh)
        if receives_responses(group, settings, revisited=rank < revisited)
    ]


def _choose_responses(config: RunConfig, state: StepState) -> dict[int, list[StoredResponse]]:
    """Returns the responses of earlier steps that join each fresh group, by the group's id."""
    settings = config.response_replay
    if settings.groups == "off":
        return {}
    chosen = {
        group.group_id: choose_responses(
            state.caches.get(group.prompt_uid, ()),
            settings,
            derive_rng(config.seed, "responses", state.step, group.prompt_uid),
        )
        for group in receives_replayed(config, state.fresh, state.revisited)
    }
    return {group_id: responses for group_id, responses in chosen.items() if responses}


def demonstration_joins(config: RunConfig, correct: int) -> bool:
    """Returns whether a demonstration joins a fresh group with this many correct responses."""
    join = config.demonstrations.join
    return join == "all" or (join == "unsolved" and correct == 0)


def _is_joined(config: RunConfig, state: StepState, group: GroupSummary) -> bool:
    return demonstration_joins(config, group.correct) and group.prompt_uid in state.demonstrated


def _choose_supervised(config: RunConfig, state: StepState) -> list[GroupSummary]:
    """Returns the hard entries whose demonstrations the step has a supervised update on (ReLIFT).

    They are the newest `demonstrations.supervise_every` entries without a correct response; none
    as long as there are fewer.
    """
    count = config.demonstrations.supervise_every
    due = [
        entry
        for entry in state.hard
        if entry.correct == 0 and entry.prompt_uid in state.demonstrated
    ]
    return due[-count:] if count and len(due) >= count else []


# ---- the buffers --------------------------------------------------------------------------------


def draw_reevaluated(
    config: RunConfig, step: int, hard: Sequence[GroupSummary]
) -> list[GroupSummary]:
    """Returns the entries of B_bad whose prompts are answered again at `step`.

    hard: B_bad after the commit of the step before, oldest first.
    """
    rng = derive_rng(config.seed, "reevaluate", step)
    return choose_reevaluated(hard, limit=config.most_reevaluated, rng=rng)


def settle(
    config: RunConfig,
    state: StepState,
    *,
    window: tuple[float, float],
    supervised: Collection[int],
) -> BufferChanges:
    """Returns how the commit of a step changes the buffers.

    Solved prompts and prompts of the supervised update leave B_bad. Then the step's unfiltered
    fresh groups enter both buffers by their accuracy. window: the replay window of the step's
    batch.
    supervised: ids of the entries that the step had a supervised update on.
    """
    changes: dict[BufferName, list[BufferChange]] = {}
    dedup, c1 = config.batch.dedup, config.reevaluate.c1
    if config.keeps_hard_buffer:
        again = {group.prompt_uid: group for group in state.reevaluated}
        solved = evict_solved(state.hard, again, c1=c1) if config.hard_buffer.evict_solved else []
        trained = [
            (entry, EvictionReason.SUPERVISED)
            for entry in state.hard
            if entry.group_id in supervised
        ]
        leaving = BufferChange(admitted=[], evicted=[*solved, *trained])
        entering = admit_hard(
            leaving.apply(state.hard),
            state.fresh,
            c1=c1,
            capacity=config.hard_capacity,
            dedup=dedup,
        )
        changes["hard"] = [leaving, entering]
    if config.replays_at(state.step + 1):
        stored = state.reevaluated if config.replays_reevaluated else ()
        change = admit_high(
            state.high,
            [*state.fresh, *stored],
            window=None if config.replays_all_mixed else window,
            capacity=config.high_quality_buffer.capacity,
            max_age=config.high_quality_buffer.max_age,
            step=state.step,
            dedup=dedup,
        )
        changes["high_quality"] = [change]
    return changes


# ---- batch rules --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchRule:
    """A rule by which batches are composed and buffers are kept; the default is Algorithm 1.

    A rule need not start anew: it may call `compose` with entries of B_high that are left out, or
    with another state, or change what `compose` returns.
    """

    compose: Callable[[RunConfig, StepState], Composition] = compose
    settle: Callable[..., BufferChanges] = settle
    """Function with the parameters of `settle`."""
    draw_reevaluated: Callable[[RunConfig, int, Sequence[GroupSummary]], list[GroupSummary]] = (
        draw_reevaluated
    )


BATCH_RULES: Mapping[str, BatchRule] = {"algorithm1": BatchRule()}
"""The built-in batch rules by their name in `batch.rule`."""


def get_batch_rule(name: str) -> BatchRule:
    """Returns a batch rule by name, which may be a plug-in's.

    Raises `ConfigError` as `find` does; so do the functions of a plug-in's rule for whatever they
    raise.
    """
    rule = find(
        name, BATCH_RULES, group=BATCH_RULE_ENTRY_POINTS, kind="batch rule", error=ConfigError
    )
    if not isinstance(rule, BatchRule):
        raise ConfigError(
            f"batch rule {name}: the entry point names {rule!r}; name a "
            "bapo_core.algorithm.BatchRule"
        )
    return rule if name in BATCH_RULES else _checked(name, rule)


def _checked(name: str, rule: BatchRule) -> BatchRule:
    """Returns a plug-in's rule that raises `ConfigError` where the plug-in fails or errs."""

    def compose(config: RunConfig, state: StepState) -> Composition:
        with report_failures("batch rule", name, ConfigError):
            return check_composition(config, state, rule.compose(config, state))

    def settle(*arguments: Any, **keywords: Any) -> BufferChanges:
        with report_failures("batch rule", name, ConfigError):
            changes = rule.settle(*arguments, **keywords)
            check_changes(changes)
            return changes

    def draw_reevaluated(
        config: RunConfig, step: int, hard: Sequence[GroupSummary]
    ) -> list[GroupSummary]:
        with report_failures("batch rule", name, ConfigError):
            drawn = list(rule.draw_reevaluated(config, step, hard))
            check_drawn(hard, drawn)
            return drawn

    return BatchRule(compose, settle, draw_reevaluated)
