"""Back-tests of samplers: the prompts that another sampler draws by the results of a recorded run.

A sampler is tested step by step on the recorded results, as `bapo_core.backtest` tests data rules.
Most prompts that it draws were not rolled out at that step, so their groups are missing, and what
they would have been is estimated (`Estimator`). The results that the sampler draws by are those of
the recorded run, too: a run with this sampler would have had those of its own prompts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

from bapo_core.backtest import RecordedStep, log_beta
from bapo_core.config import RunConfig
from bapo_core.config.samplers import AdaptiveConfig, SamplerConfig
from bapo_core.errors import ConfigError
from bapo_core.sampling import DrawContext, Posterior, draw_prompts
from bapo_core.types import GroupSummary

RECENT_STEPS = 5
"""Steps before a step whose fresh groups say how difficult prompts are that have no result yet."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of a group of responses to a prompt."""

    accuracy: float
    """Share of correct responses, mu."""
    signal: float
    """mu (1 - mu): the variance of a reward of 1 or 0 within the group."""
    no_signal: float
    """Probability that all responses are correct or none is."""

    @classmethod
    def of_posterior(cls, posterior: Posterior, size: int) -> Expectation:
        """Returns the expectation of G responses whose number correct is beta-binomial.

        With the probability p of a correct response distributed as Beta(a, b), it is

            E[mu] = a / (a + b),    E[mu (1 - mu)] = (1 - 1 / G) a b / ((a + b) (a + b + 1)),
            P(k = 0 or k = G) = (B(a, b + G) + B(a + G, b)) / B(a, b)
        """
        a, b = posterior.a, posterior.b
        before = log_beta(a, b)
        return cls(
            accuracy=posterior.mean,
            signal=(1 - 1 / size) * a * b / ((a + b) * (a + b + 1)),
            no_signal=exp(log_beta(a + size, b) - before) + exp(log_beta(a, b + size) - before),
        )

    @classmethod
    def of_group(cls, group: GroupSummary) -> Expectation:
        """Returns what was recorded."""
        accuracy = group.accuracy
        return cls(accuracy, accuracy * (1 - accuracy), float(group.correct in (0, group.size)))


def fit_prior(groups: Sequence[GroupSummary]) -> Posterior:
    """Returns the Beta distribution of the prompts' probabilities by the moments of their groups.

    The variance of mu over groups of G responses, with mean m, is m (1 - m) (1 + (G - 1) rho) / G
    with rho = 1 / (a + b + 1). It is Beta(1, 1) without groups, and if all responses are equal.
    """
    if len(groups) < 2:
        return Posterior()
    size = sum(group.size for group in groups) / len(groups)
    mean = sum(group.correct for group in groups) / sum(group.size for group in groups)
    variance = sum((group.accuracy - mean) ** 2 for group in groups) / (len(groups) - 1)
    if not 0 < mean < 1 or size <= 1:
        return Posterior()
    rho = (variance * size / (mean * (1 - mean)) - 1) / (size - 1)
    # Sampling error can take rho out of the range that a Beta distribution has.
    strength = 1 / min(max(rho, 0.01), 0.99) - 1
    return Posterior(mean * strength, (1 - mean) * strength)


class Estimator:
    """Estimates the results of prompts at a step by what was recorded before it.

    The probability of a correct response to a prompt has the prior `fit_prior` of the fresh groups
    of the last steps, and the posterior of all recorded responses to the prompt, whatever the
    policy that sampled them.
    """

    def __init__(self) -> None:
        """Initialises it without results."""
        self._recent: deque[Sequence[GroupSummary]] = deque(maxlen=RECENT_STEPS)
        self._prior = Posterior()
        self._counts: dict[int, tuple[int, int]] = {}

    def is_untried(self, position: int) -> bool:
        """Returns whether the prompt has no recorded response yet."""
        return position not in self._counts

    def expect(self, position: int, size: int) -> Expectation:
        """Returns the expectation of a group of `size` responses to the prompt at this position."""
        correct, responses = self._counts.get(position, (0, 0))
        a, b = self._prior
        return Expectation.of_posterior(Posterior(a + correct, b + responses - correct), size)

    def add(self, recorded: RecordedStep) -> None:
        """Adds the results of a step."""
        self._recent.append(recorded.fresh)
        self._prior = fit_prior([group for groups in self._recent for group in groups])
        for group in (*recorded.fresh, *recorded.reevaluated):
            position = recorded.positions[group.prompt_uid]
            correct, responses = self._counts.get(position, (0, 0))
            self._counts[position] = (correct + group.correct, responses + group.size)


class RecordedResults:
    """The results of recorded steps as a sampler gets them (`bapo_core.sampling.Results`), up to
    the commit that its draws include."""

    def __init__(self, sampler: SamplerConfig, group_size: int) -> None:
        """Initialises it without results, for the weights that a sampler gives them by their age.

        group_size: G, responses of a group.
        """
        self._sampler, self._size, self._as_of = sampler, group_size, 0
        self._newest: dict[int, tuple[int, Posterior]] = {}
        self._bins: list[list[int]] = []
        self._later: deque[RecordedStep] = deque()

    def add(self, recorded: RecordedStep) -> None:
        """Adds a step, which `advance` makes visible."""
        self._later.append(recorded)

    def advance(self, as_of: int) -> None:
        """Makes the steps up to the commit of `as_of` visible."""
        self._as_of = as_of
        while self._later and self._later[0].step <= as_of:
            recorded = self._later.popleft()
            bins = [0] * (self._size + 1)
            for group in recorded.fresh:
                position = recorded.positions[group.prompt_uid]
                posterior = self._faded(position, recorded.step).updated(
                    group.correct, group.size, decay=self._sampler.posterior_decay
                )
                self._newest[position] = (recorded.step, posterior)
                bins[group.correct] += 1
            self._bins.append(bins)

    def posteriors(self, positions: Sequence[int]) -> list[Posterior]:
        """Returns the posteriors of the prompts at these positions, in the same order."""
        return [self._faded(position, self._as_of) for position in positions]

    def all_posteriors(self) -> Mapping[int, Posterior]:
        """Returns the posteriors of all prompts that have results, by position."""
        return {position: self._faded(position, self._as_of) for position in self._newest}

    def step_bins(self) -> Sequence[Sequence[int]]:
        """Returns, for each step, its number of fresh groups with k of G correct, k = 0..G."""
        return self._bins

    def _faded(self, position: int, step: int) -> Posterior:
        if position not in self._newest:
            return Posterior()
        last, (a, b) = self._newest[position]
        weight = self._sampler.fading ** (step - last)
        return Posterior(1 + (a - 1) * weight, 1 + (b - 1) * weight)


@dataclass(frozen=True, slots=True)
class SamplerResult:
    """The prompts that a sampler draws: those with a recorded group of the step, and the others."""

    steps: int
    drawn: int
    """Prompts that the sampler draws in all steps."""
    recorded: int
    """Drawn prompts that the run rolled out at the same step."""
    untried: int
    """Drawn prompts to which no response was recorded before."""
    recorded_accuracy: float | None
    """Mean accuracy of the recorded groups of drawn prompts; None if there is none."""
    estimated_accuracy_of_recorded: float | None
    """Mean of the estimates of the same groups by what was recorded before: the difference from
    `recorded_accuracy` shows how far estimates can be trusted."""
    accuracy: float
    """Mean accuracy of all drawn prompts: recorded where there is a group, else estimated."""
    signal_per_step: float
    """Sum of mu (1 - mu) over the drawn prompts of a step, likewise."""
    no_signal: float
    """Share of drawn prompts whose responses are all correct or all wrong, likewise."""


class SamplerTest:
    """Draws the prompts of recorded steps, which are added in order, by another sampler."""

    def __init__(
        self, config: RunConfig, dataset_size: int, *, first: int = 1, where: str = "sampler"
    ) -> None:
        """Initialises it before the first step of a run.

        dataset_size: number of training prompts. first: first step that the result counts. where:
        what messages name as the place of the rules.

        Raises `ConfigError` for samplers that recorded results cannot answer.
        """
        refuse_unanswerable_sampler(config, dataset_size, where)
        self._config, self._dataset_size, self._first = config, dataset_size, first
        self._results = RecordedResults(config.sampler, config.rollout.group_size)
        self._estimator = Estimator()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, recorded: RecordedStep) -> Sequence[int]:
        """Draws the prompts of the step after the last one; returns their positions."""
        config, step = self._config, recorded.step
        self._results.advance(config.sampled_as_of(step))
        context = DrawContext(config, step, 0, self._dataset_size, self._results)
        positions = draw_prompts(context).positions
        if step >= self._first:
            self._count(recorded, positions)
        self._results.add(recorded)
        self._estimator.add(recorded)
        return positions

    def _count(self, recorded: RecordedStep, positions: Sequence[int]) -> None:
        groups = {recorded.positions[group.prompt_uid]: group for group in recorded.fresh}
        size = self._config.rollout.group_size
        for position in positions:
            estimate = self._estimator.expect(position, size)
            result = estimate
            if position in groups:
                result = Expectation.of_group(groups[position])
                self._sums["recorded"] += 1
                self._sums["recorded_accuracy"] += result.accuracy
                self._sums["estimated_accuracy"] += estimate.accuracy
            self._sums["drawn"] += 1
            self._sums["untried"] += self._estimator.is_untried(position)
            self._sums["accuracy"] += result.accuracy
            self._sums["signal"] += result.signal
            self._sums["no_signal"] += result.no_signal
        self._sums["steps"] += 1

    def result(self) -> SamplerResult:
        """Returns the result over the steps that were added."""
        sums = self._sums
        recorded, drawn = sums["recorded"], max(1.0, sums["drawn"])
        return SamplerResult(
            steps=int(sums["steps"]),
            drawn=int(sums["drawn"]),
            recorded=int(recorded),
            untried=int(sums["untried"]),
            recorded_accuracy=sums["recorded_accuracy"] / recorded if recorded else None,
            estimated_accuracy_of_recorded=sums["estimated_accuracy"] / recorded
            if recorded
            else None,
            accuracy=sums["accuracy"] / drawn,
            signal_per_step=sums["signal"] / max(1.0, sums["steps"]),
            no_signal=sums["no_signal"] / drawn,
        )


def refuse_unanswerable_sampler(config: RunConfig, dataset_size: int, where: str) -> None:
    """Raises `ConfigError` if the draws of a sampler depend on more than the run's own results."""
    sampler, rounds = config.sampler, config.rollout.max_generation_rounds
    if rounds > 1:
        raise ConfigError(
            f"{where}: rollout.max_generation_rounds is {rounds}: the results of a round decide "
            "whether a step has another one, and prompts of another sampler have no results; a "
            "back-test of samplers needs a run with rollout.max_generation_rounds=1"
        )
    if isinstance(sampler, AdaptiveConfig) and sampler.prior_run is not None:
        raise ConfigError(
            f"{where}: sampler.prior_run is {sampler.prior_run}: draws depend on the results of "
            "that run, and a back-test knows the results of one run alone; test the sampler "
            "without sampler.prior_run"
        )
    if config.prompts_needed > dataset_size:
        raise ConfigError(
            f"{where}: sampler.kind={sampler.kind} draws from {config.prompts_needed} prompts in a "
            f"step, and the run's data set has {dataset_size}; lower sampler.candidates"
        )
