"""Supervised warm start of the tiny models, which makes base models of random weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

LEARNING_RATE = 2e-3

Progress = Callable[[int, int, float], None]
"""A function of (steps done, all steps, loss), called after each step."""


@contextmanager
def two_threads() -> Iterator[None]:
    """Computes with two threads, because the result of a reduction depends on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fit(
    parameters: Sequence[nn.Parameter],
    losses: Iterator[Tensor],
    steps: int,
    show: Callable[[float], None],
) -> None:
    """Takes a step of AdamW on each of the first `steps` losses.

    show: called with the loss after each step.
    """
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1
    )
    for loss in islice(losses, steps):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        show(loss.item())


def draw_batches(examples: int, size: int, rng: random.Random) -> Iterator[list[int]]:
    """Yields batches of indices without end, in a new order in each epoch."""
    while True:
        order = list(range(examples))
        rng.shuffle(order)
        for start in range(0, examples - size + 1, size):
            yield order[start : start + size]


def pad_examples(batch: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Returns (tokens, labels), int64 [batch, width], padded on the right with token 0.

    batch: token ids of prompts and responses. Labels are -100 outside the responses, so that only
    these are learnt.
    """
    width = max(len(prompt) + len(response) for prompt, response in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        tokens[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return tokens, labels
