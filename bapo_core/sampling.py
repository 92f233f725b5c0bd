"""Draws the prompts that a step rolls out, as a pure function of (seed, step, round)."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from bapo_core.seeding import derive_seed

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
    seed: int,
    step: int,
    generation_round: int,
    *,
    dataset_size: int,
    prompts_per_step: int,
    max_rounds: int,
) -> tuple[int, ...]:
    """Returns the positions in the dataset of the B prompts of a step's generation round.

    Each epoch is another permutation, divided into steps of `prompts_per_step * max_rounds`; the
    remainder is dropped, so that no prompt comes twice in a step. With dynamic sampling, prompts
    are reserved for all rounds of a step, needed or not, so that the draw depends on nothing but
    its arguments.

    Raises `ValueError` if the dataset cannot fill one step, or for a round out of range.
    """
    reserved = prompts_per_step * max_rounds
    steps_per_epoch = dataset_size // reserved
    if steps_per_epoch == 0:
        raise ValueError(
            f"{dataset_size} prompts cannot fill one step of {reserved}; lower "
            "rollout.prompts_per_step or add prompts"
        )
    if not 0 <= generation_round < max_rounds:
        raise ValueError(f"round {generation_round} is not in 0..{max_rounds - 1}")
    epoch, within = divmod(step - 1, steps_per_epoch)
    start = within * reserved + generation_round * prompts_per_step
    key = derive_seed(seed, "epoch", epoch)
    return tuple(
        permuted(index, size=dataset_size, key=key)
        for index in range(start, start + prompts_per_step)
    )
