"""Back-tests: the batches that other data rules make of the groups that a run recorded.

The rules are the pure functions of `bapo_core.algorithm`, applied step by step to the recorded
fresh and re-evaluated groups, with buffers of their own. The policy stays the recorded one. So a
back-test says what a rule would have trained on, and not what a policy would have learned from it:
it ranks data, not methods.

A rule may ask for re-evaluations that the run did not make. They are missing from its batches, and
how many of them would have been promoted is estimated (`estimate_promotion`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma
from typing import Any

from bapo_core.algorithm import BufferName, StepState, get_batch_rule
from bapo_core.buffers import promoted
from bapo_core.config import RunConfig
from bapo_core.config.base import flatten
from bapo_core.errors import ConfigError
from bapo_core.types import GroupSummary, Source, TrainingBatch

ANSWERABLE = ("fresh", "reevaluate", "hard_buffer", "replay", "batch", "sync.reevaluate_every")
"""Sections and keys of the configuration that a recorded run's policies do not depend on."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The groups that a run recorded for a step."""

    step: int
    fresh: Sequence[GroupSummary]
    """The unfiltered fresh groups, in the order in which their prompts were drawn."""
    reevaluated: Sequence[GroupSummary]
    tokens: Mapping[int, int]
    """Response tokens of each group, by its id."""


@dataclass(frozen=True, slots=True)
class BackTestResult:
    """The batches that a rule composes of the recorded groups, as counts, means and shares in
    [0, 1]."""

    steps: int
    groups: int
    """Groups in all batches."""
    fresh: int
    reevaluated: int
    replayed: int
    fill: float
    """Share of the places of the batches that are taken."""
    no_signal: float
    """Share of the groups whose rewards are equal, so that they have no advantages."""
    signal: float
    """Mean of mu (1 - mu) over the groups: the variance of a reward of 1 or 0."""
    signal_per_step: float
    """Sum of mu (1 - mu) over the groups of a batch, on average."""
    policy_age: float
    """Mean number of steps between the policy that sampled a group and the step."""
    replay_age: float
    """Mean number of steps between the rollout of a replayed group and its replay."""
    trained_before: float
    """Share of the groups that an earlier batch had, too."""
    duplicates: int
    """Groups in a batch that has another group of their prompt."""
    rollouts: int
    """Responses that the rule asks for: fresh ones and re-evaluations."""
    tokens: int
    """Response tokens of the groups in the batches."""
    missing: int
    """Re-evaluations that the rule asks for and the run did not make."""
    missing_promoted: float
    """Estimated number of the missing re-evaluations that would have been in a batch."""


class BackTest:
    """Applies the data rules of a configuration to recorded steps, which are added in order."""

    def __init__(self, config: RunConfig, *, first: int = 1) -> None:
        """first: first step that the result counts; steps before it fill the buffers.

        Raises `ConfigError` for rules that need more than the summaries of groups.
        """
        refuse_unanswerable(config)
        self._config, self._first = config, first
        self._rule = get_batch_rule(config.batch.rule)
        self._buffers: dict[BufferName, list[GroupSummary]] = {"hard": [], "high_quality": []}
        self._r_tot: float | None = None
        self._trained: set[int] = set()  # ids in B_high that a batch has had
        self._posterior: dict[str, tuple[int, int]] = {}  # successes and attempts by prompt
        self._sums: Counter[str] = Counter()

    def add(self, recorded: RecordedStep) -> TrainingBatch:
        """Composes the batch of the step after the last one, settles the buffers, counts both."""
        config, step = self._config, recorded.step
        hard = self._buffers["hard"]
        drawn: Sequence[GroupSummary] = ()
        if config.reevaluates_at(step):
            drawn = self._rule.draw_reevaluated(config, step, hard)
        found = {group.prompt_uid: group for group in recorded.reevaluated}
        state = StepState(
            step=step,
            fresh=recorded.fresh,
            reevaluated=[found[entry.prompt_uid] for entry in drawn if entry.prompt_uid in found],
            hard=hard,
            high=self._buffers["high_quality"],
            r_tot_before=self._r_tot,
        )
        composition = self._rule.compose(config, state)
        batch = composition.batch
        if step >= self._first:
            missing = [entry for entry in drawn if entry.prompt_uid not in found]
            self._count(recorded, batch, drawn, missing)
        changes = self._rule.settle(config, state, window=batch.window, supervised=())
        for name, of_buffer in changes.items():
            for change in of_buffer:
                self._buffers[name] = change.apply(self._buffers[name])
        self._r_tot = composition.r_tot
        self._learn(recorded, batch)
        return batch

    def _count(
        self,
        recorded: RecordedStep,
        batch: TrainingBatch,
        drawn: Sequence[GroupSummary],
        missing: Sequence[GroupSummary],
    ) -> None:
        groups = [member.group for member in batch.members]
        replayed = batch.of(Source.REPLAYED)
        prompts = Counter(group.prompt_uid for group in groups)
        size = self._config.rollout.group_size
        self._sums.update(
            {
                "steps": 1,
                "groups": len(groups),
                "places": batch.capacity,
                **{source.value: count for source, count in batch.counts.items()},
                "no_signal": sum(not group.mixed for group in groups),
                "signal": sum(group.accuracy * (1 - group.accuracy) for group in groups),
                "policy_age": sum(recorded.step - group.policy_version for group in groups),
                "replay_age": sum(recorded.step - group.step for group in replayed),
                "trained_before": sum(group.group_id in self._trained for group in replayed),
                "duplicates": sum(count - 1 for count in prompts.values()),
                "rollouts": sum(group.size for group in recorded.fresh) + size * len(drawn),
                "tokens": sum(recorded.tokens.get(group.group_id, 0) for group in groups),
                "missing": len(missing),
                "missing_promoted": sum(
                    estimate_promotion(self._config, entry, *self._posterior[entry.prompt_uid])
                    for entry in missing
                ),
            }
        )

    def _learn(self, recorded: RecordedStep, batch: TrainingBatch) -> None:
        """Remembers what later steps are counted by: groups in batches, and results of prompts."""
        kept = {entry.group_id for entry in self._buffers["high_quality"]}
        self._trained |= {member.group.group_id for member in batch.members}
        self._trained &= kept
        for group in (*recorded.fresh, *recorded.reevaluated):
            successes, attempts = self._posterior.get(group.prompt_uid, (0, 0))
            self._posterior[group.prompt_uid] = (successes + group.correct, attempts + group.size)

    def result(self) -> BackTestResult:
        """Returns the result over the steps that were added."""
        sums: Mapping[str, Any] = self._sums
        groups, replayed = max(1, sums["groups"]), max(1, sums["replayed"])
        steps = max(1, sums["steps"])
        return BackTestResult(
            steps=sums["steps"],
            groups=sums["groups"],
            fresh=sums["fresh"],
            reevaluated=sums["reevaluated"],
            replayed=sums["replayed"],
            fill=sums["groups"] / max(1, sums["places"]),
            no_signal=sums["no_signal"] / groups,
            signal=sums["signal"] / groups,
            signal_per_step=sums["signal"] / steps,
            policy_age=sums["policy_age"] / groups,
            replay_age=sums["replay_age"] / replayed,
            trained_before=sums["trained_before"] / groups,
            duplicates=sums["duplicates"],
            rollouts=sums["rollouts"],
            tokens=sums["tokens"],
            missing=sums["missing"],
            missing_promoted=float(sums["missing_promoted"]),
        )


def estimate_promotion(
    config: RunConfig, entry: GroupSummary, successes: int, attempts: int
) -> float:
    """Returns the probability that a re-evaluation of a hard entry would have been promoted to X2.

    The number of correct responses is beta-binomial: the prompt's probability of a correct response
    has the posterior Beta(1 + successes, 1 + attempts - successes) of all its recorded responses so
    far, whatever the policy that sampled them.
    """
    size, settings = config.rollout.group_size, config.reevaluate
    a, b = 1 + successes, 1 + attempts - successes
    total = 0.0
    for correct in range(size + 1):
        new = GroupSummary(0, entry.prompt_uid, entry.step, correct, size)
        if promoted(entry, new, rule=settings.rule, c1=settings.c1):
            log_choices = lgamma(size + 1) - lgamma(correct + 1) - lgamma(size - correct + 1)
            log_ratio = _log_beta(a + correct, b + size - correct) - _log_beta(a, b)
            total += exp(log_choices + log_ratio)
    return total


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def refuse_unanswerable(config: RunConfig) -> None:
    """Raises `ConfigError` if batches depend on more than the summaries of groups."""
    if config.response_replay.groups != "off":
        raise ConfigError(
            f"response_replay.groups is {config.response_replay.groups}: batches have single "
            "responses of earlier steps, and a back-test knows whole groups alone"
        )
    if config.demonstrations.enabled:
        raise ConfigError(
            "demonstrations are in use: batches have demonstrations of some prompts, and a "
            "back-test knows the model's own groups alone"
        )


def refuse_other_rollouts(recorded: RunConfig, rules: RunConfig, where: str) -> None:
    """Raises `ConfigError` if rules change keys that the recorded groups depend on."""
    before, after = (flatten(config.model_dump(mode="json")) for config in (recorded, rules))
    changed = [
        f"{key}={after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
        and not {key, key.split(".")[0]} & {*ANSWERABLE, "name"}
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"{where}: {', '.join(changed[:3])}{more}: the run {recorded.name!r} has no rollouts "
            f"of such a policy; a back-test can change {', '.join(ANSWERABLE)}, and `bapo compare` "
            "trains with anything else"
        )
