"""Blank images, for the passes of ranks whose sequences have none.

The ranks gather the shards of a layer when all of them compute it, so a rank without images
computes the vision tower with a blank one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.model.conversation import load_tokenizer
from services.model.vision import Pixels, VisionProcessor, vision_tower
from services.trainer.families import base_model_of, device_of, is_sharded

_BLANK_SIZE = (224, 224)
"""Height and width of the images of blank prompts, in pixels."""


@dataclass(frozen=True)
class BlankPrompt:
    """A black image alone, for a model that `vision` has no rules for."""

    tokens: Tensor
    """(T,)"""
    pixels: Pixels

    @classmethod
    def of(cls, directory: Path) -> BlankPrompt:
        """Returns the blank prompt of the model in `directory`."""
        text, pixels = VisionProcessor.load(directory).blank_image(*_BLANK_SIZE)
        return cls(
            torch.tensor(load_tokenizer(directory).encode(text, add_special_tokens=False)), pixels
        )


def blank_prompt(model: Any) -> BlankPrompt | None:
    prompt: BlankPrompt | None = getattr(model, "blank_prompt", None)
    return prompt


def has_sharded_tower(model: Any) -> bool:
    """Returns whether a rank without images must compute the vision tower by itself.

    Models with a blank prompt compute it in a row of their own (`_padded_hidden_states`).
    """
    tower = vision_tower(base_model_of(model))
    return tower is not None and is_sharded(tower) and blank_prompt(model) is None


def idle_tower_output(model: Any) -> Tensor:
    """Returns 0, computed by the vision tower.

    The ranks gather the shards of a layer when all of them compute it. So a rank whose sequences
    have no images passes a blank image through the tower, while others pass theirs.
    """
    blank = blank_image(model.config).to(device_of(model))
    features = base_model_of(model).get_image_features(**blank.inputs_of(model), return_dict=True)
    outputs = [features.pooler_output, getattr(features, "deepstack_features", None) or ()]
    flat = torch.utils._pytree.tree_leaves(outputs)
    return sum((output.sum() for output in flat), torch.zeros((), device=device_of(model))) * 0.0


def blank_image(config: Any) -> Pixels:
    """Returns the smallest image that the vision tower of a model of this configuration takes.

    Its values are 1, because some towers leave tiles of zeros out, as padding.
    """
    if hasattr(config.vision_config, "spatial_merge_size"):
        return _on_a_grid(config)
    return _BY_TOWER.get(config.vision_config.model_type, _tile)(config)


def _on_a_grid(config: Any) -> Pixels:
    vision = config.vision_config
    side = vision.spatial_merge_size
    patch_size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return Pixels(
        {
            "pixel_values": torch.ones(side**2, patch_size),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }
    )


def _gemma4(config: Any) -> Pixels:
    vision = config.vision_config
    side = vision.pooling_kernel_size
    values = torch.ones(1, side**2, 3 * vision.patch_size**2)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))[None]
    return Pixels({"pixel_values": values, "image_position_ids": places})


def _pixtral(config: Any) -> Pixels:
    vision = config.vision_config
    # Of two by two tokens, because Mistral 3 drops the dimension of a single one.
    side = 2 * vision.patch_size * getattr(config, "spatial_merge_size", 1)
    values = torch.ones(1, vision.num_channels, side, side)
    return Pixels({"pixel_values": values, "image_sizes": torch.tensor([[side, side]])})


def _tile(config: Any) -> Pixels:
    vision = config.vision_config
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return Pixels({"pixel_values": torch.ones(1, vision.num_channels, height, width)})


_BY_TOWER: dict[str, Callable[[Any], Pixels]] = {"gemma4_vision": _gemma4, "pixtral": _pixtral}
"""What builds a blank image, by the type of the vision tower."""
