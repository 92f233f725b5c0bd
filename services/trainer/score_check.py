"""Checks that the trainer scores the responses of a model as the model itself does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.common.errors import first_line
from services.model.vision import SUBSTITUTE, fed_tokens, token_types
from services.trainer import attention
from services.trainer.blank_images import BlankPrompt
from services.trainer.data import collate
from services.trainer.hidden_states import hidden_states_of_rows, packs
from services.trainer.policy import Policy, response_logprobs

_SAME = 1e-3
"""Largest difference between equal values, as a share of the largest one."""


@torch.no_grad()
def check_scores(policy: Policy, directory: Path) -> None:
    """Raises `BapoError` unless the trainer scores responses as the model itself does.

    The model scores each alone, with the attention of transformers.
    """
    model: Any = policy.model
    groups = [([1, 2], [[3, 4, 5], [6, 3]]), ([5, 1, 4], [[2, 6]])]
    batch = collate(None, table_of([_unscored_group(*group) for group in groups]))
    with _explain_scoring_errors(model, "responses", directory):
        with attention.observed_attention() as observed:
            mine, _ = response_logprobs(policy, batch, torch.arange(len(batch.lengths)), 1.0)
        policy.attention_kinds = frozenset(observed.kinds)
        _check_windows(model, observed, directory)
        with _plain_attention(model):
            theirs = torch.cat(
                [
                    _plain_logprobs(model, prompt, response)
                    for prompt, responses in groups
                    for response in responses
                ]
            )
    difference = (mine[batch.mask] - theirs).abs().max()
    if not difference <= _SAME * theirs.abs().max().clamp(min=1.0):
        raise BapoError(
            f"{directory}: the trainer's log-probs of a {type(model).__name__} differ from the "
            f"model's own by up to {float(difference):.2g}, because it changes its logits or "
            "computes attention in a way that the trainer does not know; choose another model"
        )


def _unscored_group(prompt: list[int], responses: list[list[int]]) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt_uid="",
        prompt_token_ids=prompt,
        policy_version=1,
        responses=[
            TrajectoryResponse(tokens, [0.0] * len(tokens), 0.0, "stop", "", correct=False)
            for tokens in responses
        ],
    )


def _plain_logprobs(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Returns the log-probs (R,) of a response, of one ordinary pass over prompt and response."""
    targets = torch.tensor(response)
    tokens = torch.cat([torch.tensor(prompt), fed_tokens(model, targets)])[None]
    inputs = {"attention_mask": torch.ones_like(tokens), **token_types(model, tokens)}
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1]
    logprobs: Tensor = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logprobs


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Lets a model compute attention as transformers does, while the context lasts."""
    if not packs(model):
        yield
        return
    text = "text_config" if hasattr(model.config, "text_config") else ""
    model.set_attn_implementation({text: "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({text: attention.IMPLEMENTATION})


def _check_windows(model: Any, observed: attention.ObservedAttention, directory: Path) -> None:
    """Raises `BapoError` unless the packed attention gets the windows of the model's masks."""
    layers = getattr(model.config.get_text_config(), "layer_types", None)
    # Some models ask for the masks of all kinds of layers, also of those that they do not have.
    expected = observed.mask_windows if not layers or "sliding_attention" in layers else set()
    if packs(model) and expected - {None} != observed.windows - {None}:
        raise BapoError(
            f"{directory}: a {type(model).__name__} applies its sliding window in a way that the "
            "trainer's packed attention does not know; choose another model"
        )


@torch.no_grad()
def try_prompt(model: Any, blank: BlankPrompt, directory: Path) -> None:
    """Raises `BapoError` if the model cannot score a blank image with a few tokens behind it.

    It cannot if these tokens see later ones, as in a model that takes them for a part of a prompt.
    """
    tokens = torch.cat([blank.tokens, torch.arange(1, 7)])
    tokens[-6:] = fed_tokens(model, tokens[-6:])
    rows = tokens.repeat(2, 1)
    rows[1, -1] = SUBSTITUTE
    lengths = torch.full((2,), len(tokens))
    with _explain_scoring_errors(model, "images", directory):
        first, second = hidden_states_of_rows(model, rows, lengths, [blank.pixels] * 2)[:, :-1]
    if not torch.allclose(first, second, rtol=0.0, atol=_SAME * float(first.abs().max())):
        raise BapoError(
            f"{directory}: tokens of a {type(model).__name__} see later ones, so it has no "
            "log-probs of responses; choose another model"
        )


@contextmanager
def _explain_scoring_errors(model: Any, what: str, directory: Path) -> Iterator[None]:
    """Turns what a model raises that takes other inputs into a `BapoError` of one line."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise BapoError(
            f"{directory}: the trainer cannot score {what} with a {type(model).__name__}: "
            f"{first_line(error)}; choose another model"
        ) from error
