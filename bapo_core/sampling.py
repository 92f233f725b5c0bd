"""Samplers choose the prompts of a step, as pure functions of the configuration and of results.

A sampler is a function of a `DrawContext` that returns a `Draw`: the positions in the dataset of
the B prompts of a generation round, and why. `sampler.kind` selects one. The uniform sampler takes
each epoch in another permutation (`prompt_positions`); with dynamic sampling, each step goes on
where the one before ended (`stream_positions`). The adaptive ones draw by the results of earlier
steps: `mopps` and `dots` rank candidates (`candidate_positions`) by the probability of a correct
response to each (`Posterior`), and `exgrpo` revisits prompts (`revisit_prompts`).

Other distributions add samplers by the entry-point group `bapo.samplers`, which names such a
function (docs/adding-a-method.md).
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from bapo_core.config import RunConfig
from bapo_core.config.samplers import (
    SAMPLER_ENTRY_POINTS,
    CandidatesConfig,
    DotsConfig,
    ExgrpoConfig,
    MoppsConfig,
    SamplerConfig,
)
from bapo_core.errors import ConfigError
from bapo_core.plug_ins import find, report_failures
from bapo_core.seeding import derive_rng, derive_seed

_ROUNDS = 10
"""Rounds of the Feistel network; fewer are measurably biased on datasets of few prompts."""


def permuted(index: int, *, size: int, key: int) -> int:
    """Returns the image of `index` under a permutation of `range(size)` that `key` selects.

    The permutation is a Feistel network on the smallest even number of bits that holds `size`,
    repeated until the result is in the range (cycle walking, Black and Rogaway 2002). It takes no
    memory and a few microseconds at any size; a shuffle of a million prompts takes half a second.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            word = f"{key}/{number}/{right}".encode()
            mixed = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "big")
            left, right = right, left ^ (mixed & mask)
        index = left << half | right
        if index < size:
            return index


@lru_cache(maxsize=256)
def prompt_positions(
    seed: int, step: int, *, dataset_size: int, prompts_per_step: int
) -> tuple[int, ...]:
    """Returns the positions in the dataset of the B prompts of a step.

    Each epoch is another permutation, divided into steps of `prompts_per_step`; the remainder is
    dropped, so that no prompt comes twice in a step.

    Raises `ValueError` if the dataset cannot fill one step.
    """
    steps_per_epoch = dataset_size // prompts_per_step
    if steps_per_epoch == 0:
        raise ValueError(
            f"{dataset_size} prompts cannot fill one step of {prompts_per_step}; lower "
            "rollout.prompts_per_step or add prompts"
        )
    epoch, within = divmod(step - 1, steps_per_epoch)
    start = within * prompts_per_step
    key = derive_seed(seed, "epoch", epoch)
    return tuple(
        permuted(index, size=dataset_size, key=key)
        for index in range(start, start + prompts_per_step)
    )


@lru_cache(maxsize=256)
def stream_positions(
    seed: int, first: int, count: int, *, dataset_size: int, distinct: int
) -> tuple[int, ...]:
    """Returns the positions in the dataset of `count` prompts of the stream, from `first` on.

    Dynamic sampling draws from an endless stream of prompts: a step takes B of them in each of its
    generation rounds, and the next step goes on with the next prompt. Each epoch of the stream has
    every prompt of the dataset once. The prompts are divided at random into blocks of at most

        w = N - distinct + 1

    of the dataset's N prompts. The blocks come in the same order in each epoch, and the prompts of
    a block in another one. So a prompt moves by at most w - 1 places between two epochs and comes
    again after N - (w - 1) = `distinct` prompts at the earliest: any `distinct` consecutive prompts
    differ, also across the end of an epoch. `distinct` is the most that a step draws,
    `rollout.prompts_per_step` x `rollout.max_generation_rounds`.

    Raises `ValueError` if the dataset has fewer than `distinct` prompts.
    """
    largest = dataset_size - distinct + 1
    if largest < 1:
        raise ValueError(
            f"{dataset_size} prompts cannot fill one step of {distinct}; lower "
            "rollout.prompts_per_step or rollout.max_generation_rounds, or add prompts"
        )
    # Blocks have about equal sizes, because a small one would put the same few prompts into a
    # step again.
    block_size = math.ceil(dataset_size / math.ceil(dataset_size / largest))
    division = derive_seed(seed, "stream")

    def position(number: int) -> int:
        epoch, within = divmod(number, dataset_size)
        block, index = divmod(within, block_size)
        start = block * block_size
        size = min(block_size, dataset_size - start)
        key = derive_seed(seed, "stream", epoch, block)
        shuffled = start + permuted(index, size=size, key=key)
        return permuted(shuffled, size=dataset_size, key=division)

    return tuple(position(number) for number in range(first, first + count))


# ---- adaptive samplers --------------------------------------------------------------------------


class Posterior(NamedTuple):
    """The distribution Beta(a, b) of the probability that a response to a prompt is correct.

    It is Beta(1, 1) for a prompt without results. With s_i of k_i responses correct in the prompt's
    i-th of n groups, and lambda the decay (MoPPS, arXiv 2507.04632):

        a = 1 + sum_i lambda^(n-i) s_i,    b = 1 + sum_i lambda^(n-i) (k_i - s_i)
    """

    a: float = 1.0
    b: float = 1.0

    @property
    def mean(self) -> float:
        """The estimated probability of a correct response, a / (a + b)."""
        return self.a / (self.a + self.b)

    def updated(self, correct: int, size: int, *, decay: float) -> Posterior:
        """Returns the posterior after one more group, with `correct` of `size` responses correct.

        The paper's update is a <- lambda a + (1 - lambda) + s, and likewise for b.
        """
        return Posterior(
            decay * self.a + (1.0 - decay) + correct,
            decay * self.b + (1.0 - decay) + (size - correct),
        )


class RankedCandidate(NamedTuple):
    """A candidate of a generation round, at its place in the order in which B are taken."""

    candidate: int
    """Index of the candidate among those of the round."""
    draw: float
    """Number that the candidate is ranked by: the Thompson draw g, or the perturbed log-weight."""


@lru_cache(maxsize=16)
def candidate_positions(
    seed: int,
    step: int,
    generation_round: int,
    *,
    dataset_size: int,
    candidates_per_round: int,
    max_rounds: int,
) -> tuple[int, ...]:
    """Returns the positions in the dataset of the candidates of a step's generation round.

    They are drawn uniformly without replacement for all rounds of a step together, so that no
    prompt comes twice in a step. Each step draws anew: unlike an epoch, a number of steps need not
    see every prompt.

    Raises `ValueError` if the dataset cannot fill one step, or for a round out of range.
    """
    needed = candidates_per_round * max_rounds
    if needed > dataset_size:
        raise ValueError(
            f"{dataset_size} prompts cannot give the {needed} candidates of one step; lower "
            "sampler.candidates or rollout.prompts_per_step, or add prompts"
        )
    if not 0 <= generation_round < max_rounds:
        raise ValueError(f"round {generation_round} is not in 0..{max_rounds - 1}")
    drawn = derive_rng(seed, "candidates", step).sample(range(dataset_size), needed)
    start = generation_round * candidates_per_round
    return tuple(drawn[start : start + candidates_per_round])


def rank_candidates(
    settings: SamplerConfig,
    posteriors: Sequence[Posterior],
    *,
    seed: int,
    step: int,
    generation_round: int,
) -> list[RankedCandidate]:
    """Returns all candidates of a generation round in the order in which B are taken.

    The order is a function of the arguments: the generator derives from (seed, sampler, step,
    round). Raises `ValueError` for a sampler that ranks nothing.
    """
    rng = derive_rng(seed, settings.kind, step, generation_round)
    match settings:
        case MoppsConfig(target=target, band=band):
            return rank_by_thompson(posteriors, target=target, band=band, rng=rng)
        case DotsConfig(target=target, temperature=temperature):
            return rank_by_difficulty(posteriors, target=target, temperature=temperature, rng=rng)
        case _:
            raise ValueError(f"the sampler {settings.kind} has no candidates to rank")


def rank_by_thompson(
    posteriors: Sequence[Posterior],
    *,
    target: float = 0.5,
    band: tuple[float, float] | None = None,
    rng: random.Random,
) -> list[RankedCandidate]:
    """Ranks candidates by one Thompson draw each (MoPPS, arXiv 2507.04632).

    The draw of a candidate is g ~ Beta(a, b). The order is that of

        (g - target)^2

    from the smallest on. With a band, the candidates with band[0] <= g <= band[1] come first, in
    the order given, and the others follow by their distance.
    """
    draws = [rng.betavariate(posterior.a, posterior.b) for posterior in posteriors]

    def key(index: int) -> tuple[bool, float]:
        if band is not None and band[0] <= draws[index] <= band[1]:
            return False, 0.0
        return band is not None, (draws[index] - target) ** 2

    # The sort is stable, so equal keys keep the order given.
    return [RankedCandidate(index, draws[index]) for index in sorted(range(len(draws)), key=key)]


def rank_by_difficulty(
    posteriors: Sequence[Posterior],
    *,
    target: float = 0.5,
    temperature: float = 1e-3,
    rng: random.Random,
) -> list[RankedCandidate]:
    """Samples candidates of medium difficulty without replacement (DOTS, arXiv 2506.05316).

    The first B of the order are a sample with probabilities proportional to

        exp(-|d - target| / tau)

    because they have the B largest sums of -|d - target| / tau and Gumbel noise. In the paper, the
    difficulty is predicted by an embedding model and rollouts of reference prompts. Here d is the
    mean of the candidate's own posterior, the probability of a correct response; at the target 0.5
    that is the same. A candidate without results has d = 0.5, so with a small tau and this target,
    prompts that were never drawn come first.
    """

    def perturbed_weight(posterior: Posterior) -> float:
        # The smallest positive number keeps the logarithm finite for a draw of 0.
        exponential = max(rng.expovariate(1.0), sys.float_info.min)
        return -abs(posterior.mean - target) / temperature - math.log(exponential)

    draws = [perturbed_weight(posterior) for posterior in posteriors]
    order = sorted(range(len(draws)), key=lambda index: -draws[index])
    return [RankedCandidate(index, draws[index]) for index in order]


def revisit_prompts(
    correct: Mapping[int, int], *, count: int, group_size: int, rng: random.Random
) -> list[int]:
    """Draws prompts that were solved in part, without replacement (ExGRPO, arXiv 2510.02245).

    A prompt whose last group had k of G responses correct is in bucket k, 0 < k < G. Each draw
    takes a bucket with probability proportional to

        exp(-(k - G / 2)^2 / 2)

    among those that are not empty, and a prompt of it uniformly. Together with a success of its
    past (`response_replay`), a prompt then gets a fresh group. Prompts with k = G are retired: they
    are rolled out again only if an epoch has too few others.

    correct: k of the last group, by the position of the prompt in the dataset.
    """
    buckets: dict[int, list[int]] = {}
    for position, k in sorted(correct.items()):
        if 0 < k < group_size:
            buckets.setdefault(k, []).append(position)
    drawn: list[int] = []
    while buckets and len(drawn) < count:
        keys = sorted(buckets)
        weights = [math.exp(-((k - group_size / 2) ** 2) / 2) for k in keys]
        (k,) = rng.choices(keys, weights)
        bucket = buckets[k]
        index = rng.randrange(len(bucket))
        bucket[index], bucket[-1] = bucket[-1], bucket[index]
        drawn.append(bucket.pop())
        if not bucket:
            del buckets[k]
    return drawn


# ---- draws --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GivenResults:
    """Results in a dictionary, to try a sampler without a run (`Results`)."""

    known: Mapping[int, Posterior] = field(default_factory=dict)
    """Posteriors by position in the dataset."""
    bins: Sequence[Sequence[int]] = ()
    """Numbers of groups with k of G correct, for each step."""

    def posteriors(self, positions: Sequence[int]) -> list[Posterior]:
        """Returns the posteriors at these positions; Beta(1, 1) where none is known."""
        return [self.known.get(position, Posterior()) for position in positions]

    def all_posteriors(self) -> Mapping[int, Posterior]:
        """Returns the known posteriors."""
        return self.known

    def step_bins(self) -> Sequence[Sequence[int]]:
        """Returns the bins."""
        return self.bins


class Results(Protocol):
    """The results of a run's training prompts, as of the last commit that a draw includes."""

    def posteriors(self, positions: Sequence[int]) -> list[Posterior]:
        """Returns the posteriors of the prompts at these positions, in the same order."""
        ...

    def all_posteriors(self) -> Mapping[int, Posterior]:
        """Returns the posteriors of all prompts that have results, by position in the dataset."""
        ...

    def step_bins(self) -> Sequence[Sequence[int]]:
        """Returns, for each step, its number of fresh groups with k of G correct, k = 0..G."""
        ...


@dataclass(frozen=True, slots=True)
class DrawContext:
    """The input of a sampler: the round to draw for, and the results to draw by."""

    config: RunConfig
    step: int
    generation_round: int
    """Round of the step, from 0 on; `rollout.max_generation_rounds` bounds it."""
    dataset_size: int
    results: Results
    first: int = 0
    """Number in the stream of the step's first prompt, with `RunConfig.draws_from_stream`."""
    earlier: frozenset[int] = frozenset()
    """Positions that the earlier rounds of the step drew, which this one must leave out."""


class Rank(NamedTuple):
    """The place of a candidate among those of its round."""

    rank: int
    """From 1, the best; the first B are drawn."""
    number: float
    """Number that the candidate is ranked by."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The prompts of a generation round, and why they were drawn."""

    positions: Sequence[int]
    """Positions in the dataset of the B prompts, in the order in which they are rolled out. No
    prompt comes twice in a step."""
    revisited: int = 0
    """Number of prompts, the first ones, that were drawn for their past successes."""
    ranking: Mapping[int, Rank] = field(default_factory=dict)
    """Rank of each candidate, by its position in the dataset."""
    explain: Callable[[int, Posterior], str] | None = None
    """Function of any position and its posterior that explains to people why the prompt was drawn,
    or was not. It is called later than the draw, when `DrawContext.results` cannot be read."""


def draw_uniform(context: DrawContext) -> Draw:
    """Draws the prompts of an epoch's permutation or, with dynamic sampling, of the stream."""
    config, per_round = context.config, context.config.rollout.prompts_per_step
    if not config.draws_from_stream:
        return Draw(_epoch_positions(context))
    return Draw(
        stream_positions(
            config.seed,
            context.first + context.generation_round * per_round,
            per_round,
            dataset_size=context.dataset_size,
            distinct=config.prompts_needed,
        )
    )


def _epoch_positions(context: DrawContext) -> Sequence[int]:
    return prompt_positions(
        context.config.seed,
        context.step,
        dataset_size=context.dataset_size,
        prompts_per_step=context.config.rollout.prompts_per_step,
    )


def draw_ranked(context: DrawContext) -> Draw:
    """Draws the first B of the candidates, ranked by `sampler.kind` (`mopps` or `dots`)."""
    config, step, generation_round = context.config, context.step, context.generation_round
    settings = config.sampler
    assert isinstance(settings, CandidatesConfig)  # see SAMPLERS
    per_round = config.rollout.prompts_per_step
    positions = candidate_positions(
        config.seed,
        step,
        generation_round,
        dataset_size=context.dataset_size,
        candidates_per_round=config.candidates_per_round,
        max_rounds=config.rollout.max_generation_rounds,
    )
    ranked = rank_candidates(
        config.sampler,
        context.results.posteriors(positions),
        seed=config.seed,
        step=step,
        generation_round=generation_round,
    )
    ranking = {
        positions[candidate]: Rank(number, draw)
        for number, (candidate, draw) in enumerate(ranked, start=1)
    }

    def explain(position: int, posterior: Posterior) -> str:
        known = (
            f"posterior Beta({posterior.a:.4g}, {posterior.b:.4g}) as of step "
            f"{config.sampled_as_of(step)}"
        )
        if position not in ranking:
            total = config.candidates_per_round * config.rollout.max_generation_rounds
            return (
                f"it is not among the {total} candidates of this step, which are drawn uniformly; "
                f"{known}"
            )
        rank, number = ranking[position]
        shown = (
            f"Thompson draw g = {number:.3f}"
            if config.sampler.kind == "mopps"
            else f"log-weight with Gumbel noise = {number:.4g}"
        )
        return (
            f"rank {rank} of the {config.candidates_per_round} candidates of round "
            f"{generation_round}, of which {per_round} are rolled out: {shown}, target "
            f"{settings.target:g}, {known}"
        )

    return Draw(list(ranking)[:per_round], ranking=ranking, explain=explain)


def draw_revisited(context: DrawContext) -> Draw:
    """Draws prompts to revisit, and the others from the epoch's permutation (`exgrpo`).

    The others are without revisited and, as far as there are enough, without retired prompts. It is
    uniform until the fresh groups of a step have an accuracy above `sampler.revisit_above`.
    """
    config, step, size = context.config, context.step, context.config.rollout.group_size
    settings = config.sampler
    assert isinstance(settings, ExgrpoConfig)  # see SAMPLERS
    in_epoch = _epoch_positions(context)
    revisited: list[int] = []
    others = list(in_epoch)
    if _has_reached(settings.revisit_above, context.results.step_bins()):
        # The posterior of this sampler knows the last group alone: a is 1 + its correct responses.
        correct = {
            position: round(posterior.a) - 1
            for position, posterior in context.results.all_posteriors().items()
        }
        revisited = revisit_prompts(
            correct,
            count=int(settings.revisited_share * len(in_epoch)),
            group_size=size,
            rng=derive_rng(config.seed, "revisit", step),
        )
        taken = set(revisited)
        others = [position for position in in_epoch if position not in taken]
        others.sort(key=lambda position: correct.get(position) == size)  # retired ones last
        others = others[: len(in_epoch) - len(revisited)]

    def explain(position: int, posterior: Posterior) -> str:
        as_of, k = config.sampled_as_of(step), round(posterior.a) - 1
        result = (
            f"{k} of {size} correct in its last group as of step {as_of}"
            if posterior != Posterior()
            else f"no group as of step {as_of}"
        )
        if position in revisited:
            return f"it is one of the {len(revisited)} prompts that this step revisits: {result}"
        if position in others:
            return f"it is one of the {len(others)} prompts of the epoch's permutation: {result}"
        if k == size:
            return f"it is retired, or not in this step's part of the epoch's permutation: {result}"
        return f"it was not drawn to be revisited, nor by the epoch's permutation: {result}"

    return Draw([*revisited, *others], revisited=len(revisited), explain=explain)


def _has_reached(accuracy: float, step_bins: Sequence[Sequence[int]]) -> bool:
    """Returns whether the fresh groups of any step had a higher mean accuracy."""
    return any(
        sum(k * groups for k, groups in enumerate(bins)) > accuracy * (len(bins) - 1) * sum(bins)
        for bins in step_bins
    )


Sampler = Callable[[DrawContext], Draw]

SAMPLERS: Mapping[str, Sampler] = {
    "uniform": draw_uniform,
    "mopps": draw_ranked,
    "dots": draw_ranked,
    "exgrpo": draw_revisited,
}
"""The built-in samplers by their name in `sampler.kind`."""


def get_sampler(kind: str) -> Sampler:
    """Returns a sampler by its name, which may be a plug-in's.

    Raises `ConfigError` as `find` does.
    """
    sampler = find(kind, SAMPLERS, group=SAMPLER_ENTRY_POINTS, kind="sampler", error=ConfigError)
    if not callable(sampler):
        raise ConfigError(
            f"sampler {kind}: the entry point names {sampler!r}; name a function of a DrawContext"
        )
    return sampler


def draw_prompts(context: DrawContext) -> Draw:
    """Draws the prompts of a generation round by the sampler of the configuration.

    Raises `ConfigError` if a plug-in fails, or draws other than B different positions of the
    dataset.
    """
    kind, size = context.config.sampler.kind, context.dataset_size
    if kind in SAMPLERS:
        return SAMPLERS[kind](context)
    sampler, needed = get_sampler(kind), context.config.rollout.prompts_per_step
    with report_failures("sampler", kind, ConfigError):
        draw = sampler(context)
    if not isinstance(draw, Draw):
        raise ConfigError(f"sampler {kind} returned {draw!r}; return a bapo_core.sampling.Draw")
    numbers = [position for position in draw.positions if isinstance(position, int)]
    valid = {position for position in numbers if 0 <= position < size} - context.earlier
    if not len(valid) == len(draw.positions) == needed:
        again = " that no earlier round of the step drew" if context.earlier else ""
        raise ConfigError(
            f"sampler {kind} drew {len(draw.positions)} prompts for step {context.step}, "
            f"{len(valid)} of them different positions below {size}{again}; it must draw "
            f"rollout.prompts_per_step = {needed} of these"
        )
    return draw
