"""Samplers choose the prompts of a step, as pure functions of seed, step, round and results.

The uniform sampler takes each epoch in another permutation (`prompt_positions`); with dynamic
sampling, each step goes on where the one before ended (`stream_positions`). The adaptive ones draw
candidates uniformly (`candidate_positions`), estimate the probability of a correct response to
each of them from its results so far (`Posterior`), and rank them (`rank_by_thompson`,
`rank_by_difficulty`); the first B are rolled out.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from bapo_core.config import SamplerConfig
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
    match settings.kind:
        case "mopps":
            band = settings.band if settings.select == "band" else None
            return rank_by_thompson(posteriors, target=settings.target, band=band, rng=rng)
        case "dots":
            return rank_by_difficulty(
                posteriors, target=settings.target, temperature=settings.temperature, rng=rng
            )
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
