"""Explains the batch of a step to people: how X1, X2 and X3 decided on each prompt, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapo_core.buffers import dedup_key, is_replayable, predict_ess_fraction
from bapo_core.composition import Decision, Decisions, Outcome, StepState
from bapo_core.config import RunConfig
from bapo_core.types import GroupSummary, Source, TrainingBatch

_NAMES = {Source.FRESH: "fresh", Source.REEVALUATED: "re-evaluated", Source.REPLAYED: "replayed"}


@dataclass(frozen=True, slots=True)
class ComposedBatch:
    """A batch, and the groups that the rules of each source let pass."""

    batch: TrainingBatch
    x1: Sequence[GroupSummary]
    """The fresh groups that passed the online filter."""
    x2: Sequence[GroupSummary]
    """The re-evaluated groups that were promoted."""
    candidates: Sequence[GroupSummary]
    """The entries of B_high that X3 was drawn from."""
    left_out: Mapping[int, str]
    """Why a batch rule has left out other entries of B_high, by the group's id."""

    def ids_from(self, source: Source) -> set[int]:
        """Returns the ids of the whole groups of one source."""
        members = self.batch.members
        replayed = source is Source.REPLAYED
        # A replayed response names its rows; a fresh group may do so, too.
        return {
            member.group.group_id
            for member in members
            if member.source is source and not (replayed and member.rows is not None)
        }


def explain_composition(config: RunConfig, state: StepState, composed: ComposedBatch) -> Decisions:
    """Returns how each source of a batch decided on each prompt of the step and the buffers."""
    explainer = _Explainer(config, state, composed)
    decided: dict[str, list[Decision]] = {}
    for by_uid in (explainer.explain_fresh(), explainer.explain_hard(), explainer.explain_high()):
        for uid, decision in by_uid.items():
            decided.setdefault(uid, []).append(decision)
    return Decisions(
        decided,
        (
            Decision(Source.FRESH, "not_considered", explainer.not_drawn()),
            Decision(Source.REEVALUATED, "not_considered", explainer.not_hard()),
            explainer.not_stored(),
        ),
    )


class _Explainer:
    """Explains one batch; what it needs of it is computed once."""

    def __init__(self, config: RunConfig, state: StepState, composed: ComposedBatch) -> None:
        self._config, self._state, self._composed = config, state, composed
        self._source_of: dict[str, Source] = {}
        for member in composed.batch.members:
            self._source_of.setdefault(member.group.prompt_uid, member.source)

    # -- X1

    def not_drawn(self) -> str:
        """Explains why a prompt has no fresh group, where the sampler does not say it."""
        return (
            f"not drawn: it is not among the {len(self._state.fresh)} prompts of this step (each "
            "epoch is a permutation of the dataset)"
        )

    def explain_fresh(self) -> dict[str, Decision]:
        used = self._composed.ids_from(Source.FRESH)
        kept = {group.group_id for group in self._composed.x1}
        name = self._config.fresh.filter
        decisions = {}
        for group in self._state.fresh:
            outcome: Outcome = "not_used"
            if group.group_id in used:
                outcome, reason = "used", f"drawn at this step: {_score(group)}"
            elif group.group_id in kept:
                reason = self._no_place(group)
            else:
                reason = f"{_score(group)}: removed by the online filter (fresh.filter = {name})"
                # The uniform filter does not depend on the rewards.
                if not group.mixed and name != "uniform":
                    reason += f", because {self._explain_equal_rewards()}"
                elif name in ("gaussian", "uniform"):
                    reason += ", which keeps groups at random"
            decisions[group.prompt_uid] = Decision(Source.FRESH, outcome, reason, group)
        return decisions

    # -- X2

    def not_hard(self) -> str:
        """Explains why a prompt was not considered for re-evaluation."""
        config = self._config
        if config.reevaluates_at(self._state.step):
            return "it was not in the hard buffer before this step"
        setting = (
            f"sync.reevaluate_every = {config.sync.reevaluate_every}"
            if config.reevaluate.enabled
            else "reevaluate.enabled = false"
        )
        return f"this step has no re-evaluation ({setting})"

    def explain_hard(self) -> dict[str, Decision]:
        config, state = self._config, self._state
        if not config.reevaluates_at(state.step):
            return {}
        used = self._composed.ids_from(Source.REEVALUATED)
        promoted = {group.group_id for group in self._composed.x2}
        new_by_prompt = {group.prompt_uid: group for group in state.reevaluated}
        not_sampled = (
            f"not sampled: {len(new_by_prompt)} of {len(state.hard)} hard entries were drawn for "
            f"re-evaluation (reevaluate.max_prompts = {config.most_reevaluated})"
        )
        decisions = {}
        for stored in state.hard:
            outcome: Outcome = "not_used"
            group = new_by_prompt.get(stored.prompt_uid)
            if group is None:
                decision = Decision(Source.REEVALUATED, outcome, not_sampled, stored)
                decisions[stored.prompt_uid] = decision
                continue
            change = (
                f"accuracy {stored.accuracy:g} when stored, {group.accuracy:g} re-evaluated"
                f"{_describe_rewards(group)}"
            )
            if group.group_id in used:
                outcome, reason = "used", change
            elif group.group_id in promoted:
                reason = f"{change}: promoted, but {self._no_place(group)}"
            else:
                reason = (
                    f"{change}: not promoted under reevaluate.rule = {config.reevaluate.rule} with "
                    f"reevaluate.c1 = {config.reevaluate.c1:g}"
                )
            decisions[stored.prompt_uid] = Decision(Source.REEVALUATED, outcome, reason, group)
        return decisions

    # -- X3, and replayed responses

    def not_stored(self) -> Decision:
        """Explains why no group, and no response, of a prompt was considered for replay."""
        config = self._config
        settings = config.response_replay
        if settings.groups != "off" and config.replay.select == "off":
            reason = (
                "no response of an earlier step joined its fresh group (response_replay.groups = "
                f"{settings.groups}, response_replay.min_candidates = {settings.min_candidates})"
            )
            return Decision(Source.REPLAYED, "not_used", reason)
        if config.replays_at(self._state.step):
            reason = "it was not in the high-quality buffer before this step"
        elif config.replay.select != "off":
            reason = f"this step has no replay (replay.last_step = {config.replay.last_step})"
        else:
            reason = "this run has no replay (replay.select = off)"
        return Decision(Source.REPLAYED, "not_considered", reason)

    def explain_high(self) -> dict[str, Decision]:
        decisions = self._explain_entries() if self._config.replays_at(self._state.step) else {}
        return decisions | self._explain_responses()

    def _explain_entries(self) -> dict[str, Decision]:
        config, batch = self._config, self._composed.batch
        used = self._composed.ids_from(Source.REPLAYED)
        candidates = {entry.group_id for entry in self._composed.candidates}
        counts = batch.counts
        room = config.batch_capacity - counts[Source.FRESH] - counts[Source.REEVALUATED]
        limits = None if config.replays_all_mixed else batch.window
        window = f"the replay window [c2, c3] = [{batch.window[0]:.3f}, {batch.window[1]:.3f}]"
        inside, outside = f"within {window}", f"outside {window}"
        if limits is None:
            inside = f"with different rewards (replay.select = {config.replay.select})"
            outside = f"with equal rewards (replay.select = {config.replay.select})"
        not_sampled = (
            f"not sampled: {self._count_candidates()} entries {inside} had no group in the "
            f"batch yet, and {room} of them were drawn for the places left"
        )
        decisions: dict[str, Decision] = {}
        for entry in self._state.high:
            outcome: Outcome = "not_used"
            if entry.group_id in used:
                outcome, reason = "used", f"{_score(entry)}, {inside}{self._explain_share(entry)}"
            elif not is_replayable(entry, limits):
                reason = f"{_score(entry)}, {outside}"
            elif entry.group_id in self._composed.left_out:
                reason = f"{_score(entry)}: {self._composed.left_out[entry.group_id]}"
            elif entry.group_id not in candidates:
                reason = f"{_score(entry)}: {self._explain_distance(entry)}"
            elif entry.prompt_uid in self._source_of:
                reason = self._no_place(entry)
            else:
                reason = not_sampled
            before = decisions.get(entry.prompt_uid)
            # Of several entries of a prompt, the one in the batch counts, and else the newest.
            if before is None or before.outcome != "used":
                decision = Decision(Source.REPLAYED, outcome, reason, entry)
                decisions[entry.prompt_uid] = decision
        return decisions

    def _explain_distance(self, entry: GroupSummary) -> str:
        """Explains why an entry whose rewards fit is no candidate."""
        share = self._explain_share(entry)
        max_age = self._config.high_quality_buffer.max_age
        if share:
            return f"too far from the policy{share}"
        return f"too old (replay.buffer.max_age = {max_age} steps)"

    def _explain_share(self, entry: GroupSummary) -> str:
        """Describes the predicted effective share of an entry's tokens; "" where no rule asks."""
        replay, state = self._config.replay, self._state
        if replay.select != "effective_sample_size":
            return ""
        age = state.step - entry.policy_version
        steps = f"{age} step{'' if age == 1 else 's'}"
        limit = f"replay.min_ess_fraction = {replay.min_ess_fraction:g}"
        if state.ess_decay is None:
            return f", {steps} after its policy, before the first measured decay ({limit})"
        share = predict_ess_fraction(entry, step=state.step, decay=state.ess_decay)
        return f", with an effective share of {share:.3f} predicted after {steps} ({limit})"

    def _count_candidates(self) -> int:
        """Returns the number of entries that X3 was drawn from."""
        dedup = self._config.batch.dedup
        others = {
            dedup_key(member.group, dedup)
            for member in self._composed.batch.members
            if member.source is not Source.REPLAYED
        }
        return len({dedup_key(entry, dedup) for entry in self._composed.candidates} - others)

    def _explain_responses(self) -> dict[str, Decision]:
        """Describes the responses of earlier steps that joined the prompts' fresh groups."""
        counts: dict[str, list[str]] = {}
        for member in self._composed.batch.members:
            if member.source is Source.REPLAYED and member.rows is not None:
                text = f"{len(member.rows)} of step {member.group.step}"
                counts.setdefault(member.group.prompt_uid, []).append(text)
        settings = self._config.response_replay
        if settings.groups == "off":
            return {}
        return {
            uid: Decision(
                Source.REPLAYED,
                "used",
                f"responses of earlier steps joined its fresh group: {', '.join(texts)} "
                f"(response_replay.strategy = {settings.strategy})",
            )
            for uid, texts in counts.items()
        }

    def _explain_equal_rewards(self) -> str:
        reward = self._config.reward
        if reward.overlong_share and reward.overlong_weight:
            return (
                "its rewards are equal without the punishment of length, which the filter does not "
                "count"
            )
        return "a group with equal rewards has no advantage and no gradient"

    def _no_place(self, group: GroupSummary) -> str:
        """Explains why a group that passed the rules of its source has no place in the batch."""
        source = self._source_of.get(group.prompt_uid)
        if source is not None:
            return f"the prompt is in the batch already, as {_NAMES[source]}"
        capacity = self._config.batch_capacity
        return f"the batch was full (batch.capacity = {capacity} groups)"


def _score(group: GroupSummary) -> str:
    result = f"{group.correct} of {group.size} correct at step {group.step}"
    return f"{result}{_describe_rewards(group)}"


def _describe_rewards(group: GroupSummary) -> str:
    """Returns the range of a group's rewards, where k of G correct does not tell it."""
    lowest, highest = group.lowest_reward, group.highest_reward
    if lowest is None or highest is None or group.mixed == (0 < group.correct < group.size):
        return ""
    if group.mixed:
        return f", with rewards from {lowest:g} to {highest:g}"
    return f", with equal rewards of {lowest:g}"
