"""Which prompts a step rolls out: a pure function of (seed, step, round)."""

from __future__ import annotations

from functools import lru_cache

from bapo_core.seeding import derive_rng


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, dataset_size: int) -> tuple[int, ...]:
    order = list(range(dataset_size))
    derive_rng(seed, "epoch", epoch).shuffle(order)
    return tuple(order)


def prompt_positions(
    seed: int,
    step: int,
    generation_round: int,
    *,
    dataset_size: int,
    prompts_per_step: int,
    max_rounds: int,
) -> list[int]:
    """Positions in the dataset of the B prompts of a step's generation round.

    Each epoch is a fresh permutation, cut into steps of `prompts_per_step * max_rounds`; what is
    left over at its end is dropped, so no prompt comes twice in a step. With dynamic sampling a
    step's later rounds are reserved for it whether it needs them or not: the draw then depends
    on nothing but its arguments.
    """
    reserved = prompts_per_step * max_rounds
    steps_per_epoch = dataset_size // reserved
    if steps_per_epoch == 0:
        raise ValueError(f"{dataset_size} prompts cannot fill one step of {reserved}")
    if not 0 <= generation_round < max_rounds:
        raise ValueError(f"round {generation_round} is not in 0..{max_rounds - 1}")
    epoch, within = divmod(step - 1, steps_per_epoch)
    start = within * reserved + generation_round * prompts_per_step
    return list(_epoch_order(seed, epoch, dataset_size)[start : start + prompts_per_step])
