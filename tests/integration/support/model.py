"""A reference model of the step protocol in plain lists, without a database."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bapo_core.batch import build_batch
from bapo_core.config import RunConfig
from bapo_core.sampling import stream_positions
from bapo_core.seeding import derive_rng
from bapo_core.thresholds import replay_window
from bapo_core.types import GroupSummary

Landed = dict[tuple[int, str], dict[str, int]]
"""Maps (step, kind) to the number of correct responses by uid."""


@dataclass
class State:
    """The state of a run after a commit."""

    hard: list[GroupSummary] = field(default_factory=list)
    high: list[GroupSummary] = field(default_factory=list)
    attempts: dict[str, list[int]] = field(default_factory=dict)
    """Correct responses of each attempt by uid, oldest first."""


class Model:
    """The expected state of one run under the default rules of BAPO, or with dynamic sampling."""

    def __init__(self, config: RunConfig, uids: Sequence[str] = ()) -> None:
        """uids: the training prompts in the order of the dataset, for dynamic sampling."""
        self.config, self.uids = config, uids
        self.states = [State()]
        """`states[s]` is the state after the commit of step s."""
        self.landed: Landed = {}
        self.batches: dict[int, list[tuple[str, str, int]]] = {}
        """The members (uid, source, step that made it) of each step's batch, in order."""
        self.windows: dict[int, tuple[float, float]] = {}
        self.drawn: dict[int, list[str]] = {}
        """The uids of each step's fresh prompts, in the order of the service."""
        self.weights: dict[int, str] = {}
        """The digest of each version that was published."""
        self.set_aside: set[int] = set()
        """Versions that a rewind undid, and that were not published again."""
        self.machine = 0
        """The machine of the trainer; another one rounds otherwise."""
        self.machines: dict[int, int] = {}
        """The machine that trained each step."""

    @property
    def current_step(self) -> int:
        return len(self.states) - 1

    # -- expectations

    def reevaluated(self, step: int) -> list[str] | None:
        """Returns the prompts to re-evaluate at `step`; None before step - 1 is committed."""
        if self.current_step < step - 1:
            return None
        return [group.prompt_uid for group in self.states[step - 1].hard]

    def expected_uids(self, step: int, kind: str) -> list[str]:
        if kind == "fresh" and self.uids:
            uids = self.streamed(step)
        else:
            uids = self.drawn[step] if kind == "fresh" else self.reevaluated(step)
        assert uids is not None
        return uids

    def streamed(self, step: int) -> list[str] | None:
        """Returns the prompts of the rounds of `step` that have begun or may begin.

        None while a step before it is not complete.
        """
        first = 0
        for earlier in range(1, step):
            if not self.is_complete(earlier):
                return None
            first += len(self.landed[earlier, "fresh"])
        per_round = self.config.rollout.prompts_per_step
        landed = len(self.landed.get((step, "fresh"), {}))
        rounds = landed // per_round + (not self.is_complete(step))
        positions = stream_positions(
            self.config.seed,
            first,
            rounds * per_round,
            dataset_size=len(self.uids),
            distinct=per_round * self.config.rollout.max_generation_rounds,
        )
        return [self.uids[position] for position in positions]

    def is_complete(self, step: int) -> bool:
        """Whether the fresh groups of a step with dynamic sampling are complete."""
        rollout, landed = self.config.rollout, self.landed.get((step, "fresh"), {})
        mixed = sum(0 < correct < rollout.group_size for correct in landed.values())
        rounds, partial = divmod(len(landed), rollout.prompts_per_step)
        enough = mixed >= self.config.batch_capacity or rounds == rollout.max_generation_rounds
        return bool(rounds) and not partial and enough

    def is_set_aside(self, step: int, kind: str) -> bool:
        return self.config.rollout_version(step, kind) in self.set_aside

    def missing(self, step: int) -> bool:
        kinds = ["fresh"] + ["reevaluation"] * (step % self.config.sync.reevaluate_every == 0)
        return any(
            self.is_set_aside(step, kind)
            or set(self.landed.get((step, kind), {})) != set(self.expected_uids(step, kind))
            for kind in kinds
        )

    # -- operations

    def land(self, step: int, kind: str, correct: dict[str, int]) -> int:
        """Records groups and returns how many of them were new."""
        landed = self.landed.setdefault((step, kind), {})
        new = {uid: count for uid, count in correct.items() if uid not in landed}
        landed.update(new)
        return len(new)

    def build(self, step: int) -> None:
        state = self.states[step - 1]
        fresh = self._groups(step, "fresh")
        reevaluated = self._groups(step, "reevaluation")
        r_tot = sum(group.correct for group in fresh) / sum(group.size for group in fresh)
        settings = self.config.replay_window
        window = replay_window(r_tot, settings.c2_range, settings.c3_range)
        c1 = self.config.reevaluate.c1
        oldest_step = step - self.config.high_quality_buffer.max_age
        batch = build_batch(
            [group for group in fresh if 0 < group.correct < group.size],
            [g for g in reevaluated if c1 < g.correct / g.size < 1],
            [g for g in state.high if g.step >= oldest_step and _inside(g, window)],
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
        fresh, reevaluated = self._groups(step, "fresh"), self._groups(step, "reevaluation")
        c1 = self.config.reevaluate.c1
        solved = {group.prompt_uid for group in reevaluated if group.correct / group.size > c1}
        state.hard = [group for group in state.hard if group.prompt_uid not in solved]
        hard = [group for group in fresh if group.correct / group.size <= c1]
        state.hard = _newest(state.hard, hard, self.config.hard_capacity)
        young = [g for g in state.high if g.step > step - self.config.high_quality_buffer.max_age]
        medium = [group for group in fresh if _inside(group, self.windows[step])]
        state.high = _newest(young, medium, self.config.high_quality_buffer.capacity)
        for group in (*fresh, *reevaluated):
            state.attempts.setdefault(group.prompt_uid, []).append(group.correct)
        self.states.append(state)
        self.machines[step] = self.machine

    def publish(self, version: int) -> str:
        """Publishes the weights of the current step; returns their digest.

        They are a function of what was trained on and of the machines that did, as with a real
        trainer.
        """
        trained = [
            (member, self._correct(*member), self.machines[step])
            for step in range(1, version)
            for member in self.batches[step]
        ]
        digest = hashlib.sha256(repr(trained).encode()).hexdigest()
        if version in self.set_aside and self.weights[version] != digest:
            dropped = {other for other in self.set_aside if other >= version}
            self.set_aside -= dropped
            self.weights = {v: d for v, d in self.weights.items() if v not in dropped}
            self._drop(lambda _, made_by: made_by in dropped)
        self.set_aside.discard(version)
        self.weights[version] = digest
        return digest

    def rewind(self, step: int) -> None:
        del self.states[step + 1 :]
        self.set_aside |= {version for version in self.weights if version > step + 1}
        if self.uids or self.config.reevaluate.enabled:
            # Prompts of later steps follow from the groups that are dropped.
            made_by = {self.config.rollout_version(at, kind) for at, kind in self.landed}
            lost = {v for v in made_by if v > step + 1 and v not in self.set_aside}
            dropped = {v for v in self.set_aside if lost and v > min(lost)}
            self.set_aside -= dropped
            self.weights = {v: d for v, d in self.weights.items() if v not in dropped}
        self._drop(
            lambda at, made_by: at > step and made_by > step + 1 and made_by not in self.set_aside
        )
        self.batches = {key: value for key, value in self.batches.items() if key <= step}

    def _drop(self, invalid: Callable[[int, int], bool]) -> None:
        """Drops the groups that are invalid by their step and policy version."""
        self.landed = {
            (step, kind): groups
            for (step, kind), groups in self.landed.items()
            if not invalid(step, self.config.rollout_version(step, kind))
        }

    def _correct(self, uid: str, source: str, made_at: int) -> int:
        kind = "reevaluation" if source == "reevaluated" else "fresh"
        return self.landed[made_at, kind][uid]

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
            for position, uid in enumerate(self.expected_uids(step, kind))
        ]


def _inside(group: GroupSummary, window: tuple[float, float]) -> bool:
    return window[0] - 1e-9 <= group.correct / group.size <= window[1] + 1e-9


def _newest(
    held: list[GroupSummary], incoming: list[GroupSummary], capacity: int
) -> list[GroupSummary]:
    """Returns the newest `capacity` groups, at most one for each prompt."""
    replaced = {group.prompt_uid for group in incoming}
    queue = [group for group in held if group.prompt_uid not in replaced] + incoming
    return queue[-capacity:]
