"""The step protocol in plain lists: what the service must do, without a database."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from bapo_core.batch import build_batch
from bapo_core.config import RunConfig
from bapo_core.seeding import derive_rng
from bapo_core.thresholds import replay_window
from bapo_core.types import GroupSummary

Landed = dict[tuple[int, str], dict[str, int]]
"""(step, kind) -> uid -> how many responses are correct."""


@dataclass
class State:
    """What is known after a commit."""

    hard: list[GroupSummary] = field(default_factory=list)
    high: list[GroupSummary] = field(default_factory=list)
    attempts: dict[str, list[int]] = field(default_factory=dict)
    """uid -> correct responses of each attempt, oldest first."""


class Model:
    """One run, in the default rules of BAPO."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.states = [State()]
        """`states[s]` holds after the commit of step s."""
        self.landed: Landed = {}
        self.batches: dict[int, list[tuple[str, str, int]]] = {}
        """step -> (uid, source, step that made it) of each member, in order."""
        self.windows: dict[int, tuple[float, float]] = {}
        self.drawn: dict[int, list[str]] = {}
        """step -> uids of its fresh prompts, in order, as the service gave them."""

    @property
    def current_step(self) -> int:
        return len(self.states) - 1

    # -- what is wanted

    def reevaluated(self, step: int) -> list[str] | None:
        """The prompts to generate again at `step`; None while they are not known."""
        if self.current_step < step - 1:
            return None
        return [group.prompt_uid for group in self.states[step - 1].hard]

    def wanted(self, step: int, kind: str) -> list[str]:
        uids = self.drawn[step] if kind == "fresh" else self.reevaluated(step)
        assert uids is not None
        return uids

    def missing(self, step: int) -> bool:
        kinds = ["fresh"] + ["reevaluation"] * (step % self.config.sync.reevaluate_every == 0)
        return any(
            set(self.landed.get((step, kind), {})) != set(self.wanted(step, kind)) for kind in kinds
        )

    # -- what happens

    def land(self, step: int, kind: str, correct: dict[str, int]) -> int:
        """How many of the groups were new."""
        known = self.landed.setdefault((step, kind), {})
        fresh = {uid: count for uid, count in correct.items() if uid not in known}
        known.update(fresh)
        return len(fresh)

    def build(self, step: int) -> None:
        state = self.states[step - 1]
        fresh = self._groups(step, "fresh")
        again = self._groups(step, "reevaluation")
        r_tot = sum(group.correct for group in fresh) / sum(group.size for group in fresh)
        settings = self.config.replay_window
        window = replay_window(r_tot, settings.c2_range, settings.c3_range)
        c1 = self.config.reevaluate.c1
        oldest = step - self.config.high_quality_buffer.max_age
        batch = build_batch(
            [group for group in fresh if 0 < group.correct < group.size],
            [g for g in again if c1 < g.correct / g.size < 1],
            [g for g in state.high if g.step >= oldest and _inside(g, window)],
            capacity=self.config.batch_capacity,
            window=window,
            c1=c1,
            rng=derive_rng(self.config.seed, "batch", step),
        )
        self.windows[step] = window
        self.batches[step] = [
            (m.group.prompt_uid, m.source.value, m.group.step) for m in batch.members
        ]

    def commit(self, step: int) -> None:
        state = copy.deepcopy(self.states[-1])
        fresh, again = self._groups(step, "fresh"), self._groups(step, "reevaluation")
        c1 = self.config.reevaluate.c1
        solved = {group.prompt_uid for group in again if group.correct / group.size > c1}
        state.hard = [group for group in state.hard if group.prompt_uid not in solved]
        hard = [group for group in fresh if group.correct / group.size <= c1]
        state.hard = _newest(state.hard, hard, self.config.hard_capacity)
        young = [g for g in state.high if g.step > step - self.config.high_quality_buffer.max_age]
        medium = [group for group in fresh if _inside(group, self.windows[step])]
        state.high = _newest(young, medium, self.config.high_quality_buffer.capacity)
        for group in (*fresh, *again):
            state.attempts.setdefault(group.prompt_uid, []).append(group.correct)
        self.states.append(state)

    def rewind(self, step: int) -> None:
        del self.states[step + 1 :]
        self.landed = {key: value for key, value in self.landed.items() if key[0] <= step}
        self.batches = {key: value for key, value in self.batches.items() if key <= step}

    def _groups(self, step: int, kind: str) -> list[GroupSummary]:
        if (step, kind) not in self.landed:
            return []
        landed = self.landed[step, kind]
        offset = 0 if kind == "fresh" else 1000
        return [
            GroupSummary(
                group_id=step * 10_000 + offset + position,
                prompt_uid=uid,
                step=step,
                correct=landed[uid],
                size=self.config.rollout.group_size,
                policy_version=1,
            )
            for position, uid in enumerate(self.wanted(step, kind))
        ]


def _inside(group: GroupSummary, window: tuple[float, float]) -> bool:
    return window[0] - 1e-9 <= group.correct / group.size <= window[1] + 1e-9


def _newest(
    held: list[GroupSummary], incoming: list[GroupSummary], capacity: int
) -> list[GroupSummary]:
    """A queue in which the newest group of a prompt takes the place of the others."""
    replaced = {group.prompt_uid for group in incoming}
    queue = [group for group in held if group.prompt_uid not in replaced] + incoming
    return queue[-capacity:]
