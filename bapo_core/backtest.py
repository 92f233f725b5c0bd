"""Back-tests: the batches that other data rules make of the groups that a run recorded.

The rules are the pure functions of `bapo_core.algorithm`, applied step by step to the recorded
fresh and re-evaluated groups, with buffers of their own. The policy stays the recorded one. So a
back-test says what a rule would have trained on, and not what a policy would have learned from it:
it ranks data, not methods.

A rule may ask for re-evaluations that the run did not make. They are missing from its batches, and
how many of them would have been promoted is estimated (`estimate_promotion`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma
from statistics import fmean
from typing import Any, NamedTuple

from bapo_core.algorithm import BufferName, StepState, get_batch_rule
from bapo_core.buffers import DECAY_STEPS, median_decay, promoted
from bapo_core.config import RunConfig
from bapo_core.config.base import flatten
from bapo_core.errors import ConfigError
from bapo_core.metrics import AGES
from bapo_core.types import ESS_DECAY, GroupSummary, Source, TrainingBatch

ANSWERABLE = (
    "fresh",
    "reevaluate",
    "hard_buffer",
    "replay",
    "batch",
    "sync.reevaluate_every",
    "loss.mask_truncated",
)
"""Sections and keys of the configuration that a back-test can change: they choose among the
recorded groups and their responses."""
NO_BATCH_DEPENDS_ON = ("evaluation", "checkpoint", "mlflow", "trainer")
"""Sections of the configuration that change nothing that a back-test shows."""


class EffectiveShares:
    """The effective share of the tokens of each age, as the trainer measured it at each step.

    It is `divergence/age_<steps>/ess_fraction` of a step's metrics: (sum w)^2 / (n sum w^2) over
    the tokens of that age, with their ratios w between the step's policy and the policy that
    sampled them.
    """

    def __init__(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """metrics: the metrics of committed steps, by step."""
        self._of_step = {
            step: {
                name: values[key]
                for name, _, _ in AGES
                if (key := f"divergence/age_{name}/ess_fraction") in values
            }
            for step, values in metrics.items()
        }
        self._decay_steps = sorted(step for step in metrics if ESS_DECAY in metrics[step])
        self._decays = [metrics[step][ESS_DECAY] for step in self._decay_steps]
        self._mean = {}
        for name, _, _ in AGES:
            known = [shares[name] for shares in self._of_step.values() if name in shares]
            if known:
                self._mean[name] = fmean(known)

    def decay_before(self, step: int) -> float | None:
        """Returns the decay of the effective share with age that the steps before `step` measured.

        It is the one by which the rule `replay.select: effective_sample_size` predicts.
        """
        end = bisect_left(self._decay_steps, step)
        return median_decay(self._decays[max(0, end - DECAY_STEPS) : end])

    @property
    def knows_decay(self) -> bool:
        """Whether a step has measured the decay of the effective share."""
        return bool(self._decays)

    def of_age(self, step: int, age: int) -> tuple[float | None, bool]:
        """Returns the effective share of tokens of an age at a step, and whether it was measured.

        It is the share at this step, or else the mean of all steps at which tokens of the age were
        trained on. For an age that no step had, it is the mean of the next younger age that was
        measured, which is too high as a rule. It is None if there is none.
        """
        index = next(i for i, (_, first, last) in enumerate(AGES) if first <= age <= last)
        name = AGES[index][0]
        share = self._of_step.get(step, {}).get(name, self._mean.get(name))
        if share is not None:
            return share, True
        younger = [self._mean[name] for name, _, _ in AGES[:index] if name in self._mean]
        return (younger[-1] if younger else None), False


class GroupLength(NamedTuple):
    """The length of the responses of a group."""

    tokens: int
    """Response tokens of the group."""
    cut_off: int | None
    """Responses that were cut off at `rollout.max_response_tokens`; None if it is not known."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The groups that a run recorded for a step."""

    step: int
    fresh: Sequence[GroupSummary]
    """The unfiltered fresh groups, in the order in which their prompts were drawn."""
    reevaluated: Sequence[GroupSummary]
    lengths: Mapping[int, GroupLength]
    """The length of each group's responses, by its id."""
    positions: Mapping[str, int]
    """Position in the dataset of each prompt, by its id."""


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
    replay_ess: float | None
    """Estimated effective share of the tokens of replayed groups, by the ages of their policies
    (`EffectiveShares`): sum n / sum (n / s) over the groups, with n tokens of the effective share
    s. That is the share of all tokens together if the mean ratio of each group is 1. None without
    replayed groups whose share is known."""
    replay_ess_measured: float
    """Share of the tokens of replayed groups whose age was measured."""
    cut_off: float | None
    """Share of the responses that were cut off at `rollout.max_response_tokens`; None if it is not
    known of all groups."""
    without_loss: float | None
    """Share of the responses that have no loss: those that were cut off, if `loss.mask_truncated`
    is set."""
    missing: int
    """Re-evaluations that the rule asks for and the run did not make."""
    missing_promoted: float
    """Estimated number of the missing re-evaluations that would have been in a batch."""


class BackTest:
    """Applies the data rules of a configuration to recorded steps, which are added in order."""

    def __init__(
        self, config: RunConfig, *, first: int = 1, shares: EffectiveShares | None = None
    ) -> None:
        """Initialises it before the first step of a run.

        first: first step that the result counts; steps before it fill the buffers. shares: of the
        tokens of each age; without, `replay_ess` is None.

        Raises `ConfigError` for rules that need more than the summaries of groups.
        """
        refuse_unanswerable(config)
        self._config, self._first = config, first
        self._shares = shares or EffectiveShares({})
        self._rule = get_batch_rule(config.batch.rule)
        self._buffers: dict[BufferName, list[GroupSummary]] = {"hard": [], "high_quality": []}
        self._r_tot: float | None = None
        self._trained: set[int] = set()  # ids in B_high that a batch has had
        self._lengths: dict[int, GroupLength] = {}  # of the groups of a step, and in B_high
        self._posterior: dict[str, tuple[int, int]] = {}  # successes and attempts by prompt
        self._sums: Counter[str] = Counter()
        self._inverse = 0.0  # sum n / s over replayed groups

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
            ess_decay=self._shares.decay_before(step),
        )
        composition = self._rule.compose(config, state)
        batch = composition.batch
        self._lengths.update(recorded.lengths)
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
                "tokens": sum(self._lengths[group.group_id].tokens for group in groups),
                "responses": sum(group.size for group in groups),
                "cut_off": sum(self._lengths[group.group_id].cut_off or 0 for group in groups),
                "unknown": sum(self._lengths[group.group_id].cut_off is None for group in groups),
                "missing": len(missing),
                "missing_promoted": sum(
                    estimate_promotion(self._config, entry, *self._posterior[entry.prompt_uid])
                    for entry in missing
                ),
            }
        )
        for group in replayed:
            tokens = self._lengths[group.group_id].tokens
            share, measured = self._shares.of_age(
                recorded.step, recorded.step - group.policy_version
            )
            self._sums["replayed_tokens"] += tokens
            if share:  # It is 0 if all ratios underflowed.
                self._sums["ess_tokens"] += tokens
                self._inverse += tokens / share
            self._sums["measured_tokens"] += tokens * measured

    def _learn(self, recorded: RecordedStep, batch: TrainingBatch) -> None:
        """Remembers what later steps are counted by: groups in batches, and results of prompts."""
        kept = {entry.group_id for entry in self._buffers["high_quality"]}
        self._trained |= {member.group.group_id for member in batch.members}
        self._trained &= kept
        self._lengths = {key: value for key, value in self._lengths.items() if key in kept}
        for group in (*recorded.fresh, *recorded.reevaluated):
            successes, attempts = self._posterior.get(group.prompt_uid, (0, 0))
            self._posterior[group.prompt_uid] = (successes + group.correct, attempts + group.size)

    def result(self) -> BackTestResult:
        """Returns the result over the steps that were added."""
        sums: Mapping[str, Any] = self._sums
        groups, replayed = max(1, sums["groups"]), max(1, sums["replayed"])
        steps = max(1, sums["steps"])
        cut_off = None if sums["unknown"] else sums["cut_off"] / max(1, sums["responses"])
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
            replay_ess=(sums["ess_tokens"] / self._inverse if self._inverse else None),
            replay_ess_measured=sums["measured_tokens"] / max(1, sums["replayed_tokens"]),
            cut_off=cut_off,
            without_loss=cut_off if self._config.loss.mask_truncated else 0.0,
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
            log_ratio = log_beta(a + correct, b + size - correct) - log_beta(a, b)
            total += exp(log_choices + log_ratio)
    return total


def log_beta(a: float, b: float) -> float:
    """Returns the logarithm of the beta function B(a, b)."""
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def refuse_unanswerable(config: RunConfig) -> None:
    """Raises `ConfigError` if batches depend on more than the summaries of groups."""
    run = f"the run {config.name!r} cannot be back-tested"
    if config.response_replay.groups != "off":
        raise ConfigError(
            f"response_replay.groups is {config.response_replay.groups}: batches have single "
            f"responses of earlier steps, and a back-test knows whole groups alone, so {run}"
        )
    if config.demonstrations.enabled:
        raise ConfigError(
            "demonstrations are in use: batches have demonstrations of some prompts, and a "
            f"back-test knows the model's own groups alone, so {run}"
        )


def refuse_other_rollouts(recorded: RunConfig, rules: RunConfig, where: str) -> None:
    """Raises `ConfigError` if rules change keys that a back-test cannot answer.

    A sampler is tested by itself: batches of prompts that were not rolled out cannot be composed.
    """
    before, after = (flatten(config.model_dump(mode="json")) for config in (recorded, rules))
    values = {
        key: f"{key}={after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key != "name"
    }
    sections = {key: key.split(".")[0] for key in values}
    irrelevant = [values[key] for key in values if sections[key] in NO_BATCH_DEPENDS_ON]
    if irrelevant:
        raise ConfigError(
            f"{where}: {_join(irrelevant)}: no batch depends on it, so a back-test shows nothing "
            "of it; leave it out"
        )
    others = [values[key] for key in values if not {key, sections[key]} & {*ANSWERABLE, "sampler"}]
    if others:
        raise ConfigError(
            f"{where}: {_join(others)}: the run {recorded.name!r} has no rollouts of such a "
            f"policy; a back-test can change sampler, {', '.join(ANSWERABLE)}, and `bapo compare` "
            "trains with anything else"
        )
    rules_of_data = [values[key] for key in values if sections[key] != "sampler"]
    if len(rules_of_data) < len(values) and rules_of_data:
        raise ConfigError(
            f"{where}: {_join(rules_of_data)} beside a sampler: most prompts that another sampler "
            "draws were not rolled out, so there are no batches to compose; give the sampler a "
            "label of its own"
        )


def _join(values: Sequence[str]) -> str:
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return f"{', '.join(values[:3])}{more}"
