"""Prepares prompts for models that read images: their token ids and their pixel values.

Supported are the architectures of `ARCHITECTURES`, whose images are patches on a grid and whose
prompts have one placeholder token for each patch that the language model sees. The collector, the
engines and the trainer all use this module, so that all have the same tokens and the same pixels.

Images are processed with Pillow, not with torchvision: the two scale images slightly differently,
and a process with torchvision would compute other log-probs than one without. The processors of
transformers are not used as a whole, because they also contain video processors, which cannot be
loaded without torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError
from bapo_core.tasks import Message
from services.common.images import ImageReference, decode_image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v")
"""Types of the models that read images, as `model_type` in config.json."""

NOT_WITH_VLLM = ("glm4v", "glm46v")
"""Those whose images vLLM does not take as pixel values and token ids."""

SUBSTITUTE = 0
"""Token that is fed to a model in place of a sampled placeholder."""

OpenImage = Callable[[str], bytes]
"""Function that returns the bytes of an image by its digest."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Images in the form that a model's vision tower takes."""

    values: Tensor
    """(patches, channels x pixels of a patch) float32: the patches of all images, in order."""
    grids: Tensor
    """(images, 3) int64: patches of each image in time, height and width."""

    def to(self, device: torch.device) -> Pixels:
        """Returns a copy on `device`."""
        return Pixels(self.values.to(device), self.grids.to(device))


class VisionProcessor:
    """Prepares prompts and images for one model."""

    def __init__(self, image_processor: Any, image_token_id: int) -> None:
        self._processor, self.image_token_id = image_processor, image_token_id

    @classmethod
    def load(cls, directory: Path) -> VisionProcessor:
        """Loads the processor of a model directory that `reads_images`.

        Raises `BapoError` if the processor or a package that it needs is missing.
        """
        from transformers import AutoImageProcessor

        try:
            load: Any = AutoImageProcessor.from_pretrained
            processor: Any = load(directory, backend="pil")
        except (OSError, ValueError, ImportError, KeyError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            raise BapoError(
                f"{directory}: its image processor cannot be loaded: {reason or error!r}; give a "
                "directory with the preprocessor_config.json of the model, and install what it "
                "names"
            ) from error
        return cls(processor, int(_read_config(directory)["image_token_id"]))

    def expand(self, token_ids: Sequence[int], images: Sequence[ImageReference]) -> list[int]:
        """Repeats the placeholder of each image once for each patch that the model sees.

        token_ids: of a rendered prompt, with one placeholder for each image. Raises `BapoError` for
        another number of placeholders.
        """
        placeholders = sum(token == self.image_token_id for token in token_ids)
        if placeholders != len(images):
            raise BapoError(
                f"the rendered prompt has {placeholders} placeholders for {len(images)} images; "
                "give a model whose chat template renders images, and remove the placeholder from "
                "the problem's text"
            )
        remaining = iter(images)
        expanded: list[int] = []
        for token in token_ids:
            repeats = self._patches(next(remaining)) if token == self.image_token_id else 1
            expanded += [token] * repeats
        return expanded

    def _patches(self, image: ImageReference) -> int:
        """Returns the number of patches of an image that the language model sees."""
        count = self._processor.get_number_of_image_patches
        patches = int(count(image["height"], image["width"], {}))
        return patches // int(self._processor.merge_size) ** 2

    def pixels(self, images: Sequence[bytes]) -> Pixels:
        """Returns the pixel values of at least one image file."""
        prepared = self._processor(
            images=[decode_image(data) for data in images], return_tensors="pt"
        )
        return Pixels(prepared["pixel_values"].float(), prepared["image_grid_thw"].long())


def reads_images(directory: Path) -> bool:
    """Returns whether the model of a directory is of a supported architecture that reads images."""
    return _read_config(directory).get("model_type") in ARCHITECTURES


def load_processor(directory: Path) -> VisionProcessor | None:
    """Returns the processor of a model that reads images, and None for another model."""
    return VisionProcessor.load(directory) if reads_images(directory) else None


def images_of(messages: Sequence[Message]) -> list[ImageReference]:
    """Returns the images of a conversation, in order."""
    return [
        ImageReference(digest=part["digest"], width=part["width"], height=part["height"])
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def check_model(directory: Path, engine: str = "transformers") -> None:
    """Raises `BapoError` unless the model reads images with the packages that are installed.

    engine: `rollout.engine` of the run.
    """
    model_type = _read_config(directory).get("model_type")
    if engine == "vllm" and model_type in NOT_WITH_VLLM:
        raise BapoError(
            f"model.path {directory}: vLLM does not take images of a model of the type "
            f"{model_type} together with token ids; set rollout.engine to transformers, or choose "
            "another model"
        )
    if model_type not in ARCHITECTURES:
        raise BapoError(
            f"model.path {directory}: the prompts have images, but a model of the type "
            f"{model_type} has no vision tower that bapo supports; choose one of the types "
            f"{', '.join(ARCHITECTURES)}"
        )
    VisionProcessor.load(directory)


def fed_tokens(model: Any, response_tokens: Tensor) -> Tensor:
    """Returns the tokens that are fed to `model` for tokens of responses.

    A model may sample the placeholder of an image, for which there is no image. Engine and trainer
    alike feed `SUBSTITUTE` in its place, so that their log-probs agree.
    """
    if model.config.model_type not in ARCHITECTURES:
        return response_tokens
    sampled = response_tokens == model.config.image_token_id
    return response_tokens.masked_fill(sampled, SUBSTITUTE)


def rope_positions(model: Any, tokens: Tensor, mask: Tensor, grids: Tensor | None) -> Any:
    """Returns (positions (3, N, L), offsets (N, 1)) of multimodal rotary embeddings.

    model: the model without its output layer. tokens: (N, L). mask: (N, L), false at padding.
    grids: of all images of all rows, in order. The position of the t-th token after a row's last
    one is its number of tokens plus its offset plus t.
    """
    is_image = (tokens == model.config.image_token_id).int()
    return model.get_rope_index(
        tokens, mm_token_type_ids=is_image, image_grid_thw=grids, attention_mask=mask.long()
    )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}  # The function that loads the model reports what is wrong with the file.
    return config
