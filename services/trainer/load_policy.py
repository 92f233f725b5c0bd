"""Loads the policy from a model directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from bapo_core.errors import BapoError
from services.common.logs import hide_progress_bars
from services.model.layers import has_recurrent_layers
from services.model.load_errors import explain_load_error
from services.model.resolve import BUNDLED_MODELS
from services.model.vision import has_rules, reads_images, vision_tower
from services.trainer import attention
from services.trainer.blank_images import BlankPrompt, blank_prompt
from services.trainer.families import base_model_of, is_packable
from services.trainer.policy import Policy
from services.trainer.score_check import check_scores, try_prompt


def load_policy(directory: Path) -> Policy:
    """Loads the causal language model of a Hugging Face directory, in fp32.

    It may read images (`services.model.vision`). Raises `BapoError` for a directory without one,
    or a model that the trainer cannot score.
    """
    hide_progress_bars()
    with _explain_load_errors(directory):
        auto: Any = _auto_class(directory)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        model: Any = auto.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=_attention(auto, config),
            # A model directory must not be able to run code here: neither modules nor pickles.
            use_safetensors=True,
            trust_remote_code=False,
        )
    policy = _make_policy(model, directory)
    if torch.cuda.is_available() and has_recurrent_layers(type(model), config):
        return policy  # The kernels of its layers may need a GPU, and the model is on the CPU.
    check_scores(policy, directory)
    if (blank := blank_prompt(model)) is not None:
        try_prompt(model, blank, directory)
    return policy


def empty_policy(directory: Path) -> Policy:
    """Builds the model with uninitialised weights, to be filled from rank 0.

    The memory costs nothing until it is written: the kernel has not mapped it yet.
    """
    with _explain_load_errors(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            auto: Any = _auto_class(directory)
            model: Any = auto.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=_attention(auto, config),
                trust_remote_code=False,
            )
    model.to_empty(device="cpu")
    model.tie_weights()
    return _make_policy(model, directory)


def freeze_vision(model: Any) -> None:
    """Freezes the vision tower, adapters included, of a model that reads images, in place."""
    tower = vision_tower(base_model_of(model))
    if tower is not None:
        tower.requires_grad_(False)
    elif blank_prompt(model) is not None:
        raise BapoError(
            f"the vision tower of a {type(model).__name__} cannot be told from its other parts; "
            "set model.freeze_vision to false"
        )


def _make_policy(model: Any, directory: Path) -> Policy:
    if reads_images(directory) and not has_rules(model.config):
        model.blank_prompt = BlankPrompt.of(directory)
    return Policy(model).eval()


def _auto_class(directory: Path) -> type:
    return AutoModelForImageTextToText if reads_images(directory) else AutoModelForCausalLM


def _attention(auto: Any, config: Any) -> str | dict[str, str] | None:
    """Returns the implementations of attention; None lets transformers choose one for padded rows.

    A vision tower has no sequences to pack.
    """
    packable = is_packable(auto._model_mapping.get(type(config), None), config)
    if auto is not AutoModelForImageTextToText:
        return attention.IMPLEMENTATION if packable else None
    if not has_rules(config) or not packable:
        return "sdpa"
    return {"text_config": attention.IMPLEMENTATION, "vision_config": "sdpa"}


@contextmanager
def _explain_load_errors(directory: Path) -> Iterator[None]:
    """Turns what transformers raises for a bad model directory into a `BapoError` of one line."""
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"{directory} is not a model directory: it has no config.json; set model.path to a "
            f"Hugging Face directory, or to one of {', '.join(BUNDLED_MODELS)}"
        )
    try:
        yield
    except BapoError:
        raise
    except Exception as error:  # of any kind, as what the files say is any
        reason = explain_load_error(error)
        raise BapoError(f"{directory}: the model cannot be loaded: {reason}") from error
