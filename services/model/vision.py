"""Prepares prompts for models that read images: their token ids and their pixel values.

Supported are the architectures of `ARCHITECTURES`, in two forms. Images of those in `ON_A_GRID` are
patches on a grid, with positions in three dimensions. Images of those in `OF_TILES` are one or
several tiles of equal size, with ordinary positions. In both, prompts have one placeholder token
for each output of the vision tower that the language model sees, and in some models further tokens
around and between them. The collector, the engines and the trainer all use this module, so that all
have the same tokens and the same pixels.

Images are processed with Pillow, not with torchvision: the two scale images slightly differently,
and a process with torchvision would compute other log-probs than one without. The processors of
transformers are not used as a whole, because they also contain video processors, which cannot be
loaded without torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError
from bapo_core.tasks import Message
from services.common.errors import first_line
from services.common.images import ImageReference, decode_image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ON_A_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v")
OF_TILES = ("llava", "internvl", "idefics3", "smolvlm")
ARCHITECTURES = (*ON_A_GRID, *OF_TILES)
"""Types of the models that read images, as `model_type` in config.json."""

WITH_VLLM = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those whose images vLLM takes as pixel values, beside token ids."""

IN_ROWS = ("idefics3", "smolvlm")
"""Those that take the tiles of several texts, as (texts, tiles, channels, height, width)."""

SUBSTITUTE = 0
"""Token that is fed to a model in place of a sampled placeholder."""

OpenImage = Callable[[str], bytes]
"""Function that returns the bytes of an image by its digest."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Images in the form that a model's vision tower takes."""

    values: Tensor
    """(patches, channels x pixels of a patch) float32: the patches of all images, in order; or
    (tiles, channels, height, width): the tiles of all images."""
    grids: Tensor | None
    """(images, 3) int64: patches of each image in time, height and width; None for tiles."""

    def inputs_of(self, model: Any) -> dict[str, Tensor]:
        """Returns the arguments of `model`, for images of any number of texts."""
        values = self.values[None] if model.config.model_type in IN_ROWS else self.values
        grids = {} if self.grids is None else {"image_grid_thw": self.grids}
        return {"pixel_values": values, **grids}

    def to(self, device: torch.device) -> Pixels:
        """Returns a copy on `device`."""
        grids = None if self.grids is None else self.grids.to(device)
        return Pixels(self.values.to(device), grids)


ExpandImage = Callable[[int, int], list[int]]
"""Function that returns the token ids that stand for an image, by its height and width."""


class VisionProcessor:
    """Prepares prompts and images for one model."""

    def __init__(
        self,
        image_processor: Any,
        image_token_id: int,
        expand_image: ExpandImage,
        options: Mapping[str, Any],
    ) -> None:
        """options: arguments with which the image processor divides an image."""
        self._processor, self.image_token_id = image_processor, image_token_id
        self._expand_image, self._options = expand_image, options

    @classmethod
    def load(cls, directory: Path) -> VisionProcessor:
        """Loads the processor of a model directory that `reads_images`.

        Raises `BapoError` if the processor or a package that it needs is missing.
        """
        from transformers import AutoConfig, AutoImageProcessor

        try:
            load: Any = AutoImageProcessor.from_pretrained
            processor: Any = load(directory, backend="pil")
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise BapoError(
                f"{directory}: its image processor cannot be loaded: {first_line(error)}; give a "
                "directory with the preprocessor_config.json of the model, and install what it "
                "names"
            ) from error
        config = AutoConfig.from_pretrained(directory)
        options = _OPTIONS.get(config.model_type, {})
        expand_image = _expansion(config, directory, processor, options)
        return cls(processor, int(config.image_token_id), expand_image, options)

    def expand(self, token_ids: Sequence[int], images: Sequence[ImageReference]) -> list[int]:
        """Repeats the placeholder of each image once for each output that the model sees.

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
            if token == self.image_token_id:
                image = next(remaining)
                expanded += self._expand_image(image["height"], image["width"])
            else:
                expanded.append(token)
        return expanded

    def pixels(self, images: Sequence[bytes]) -> Pixels:
        """Returns the pixel values of at least one image file."""
        prepared = self._processor(
            images=[decode_image(data) for data in images], return_tensors="pt", **self._options
        )
        values, grids = prepared["pixel_values"].float(), prepared.get("image_grid_thw")
        if values.ndim == 5:  # of one text
            values = values.flatten(0, 1)
        return Pixels(values, None if grids is None else grids.long())


_OPTIONS: Mapping[str, Mapping[str, Any]] = {"internvl": {"crop_to_patches": True}}
"""Options that the processors of transformers give to their image processors."""


def _expansion(
    config: Any, directory: Path, image_processor: Any, options: Mapping[str, Any]
) -> ExpandImage:
    """Returns what writes the tokens of an image as the processor of transformers does.

    That processor itself may contain a video processor, which needs torchvision.
    """
    image = int(config.image_token_id)

    def count_patches(height: int, width: int) -> int:
        return int(image_processor.get_number_of_image_patches(height, width, dict(options)))

    if config.model_type in ON_A_GRID:
        merged = int(image_processor.merge_size) ** 2
        return lambda height, width: [image] * (count_patches(height, width) // merged)
    if config.model_type in IN_ROWS:
        return _tiles_in_rows(config, directory, image_processor)
    if config.model_type == "internvl":
        before, after = _token_ids(_load_tokenizer(directory), directory, "<img>", "</img>")
        tokens = int(config.image_seq_length)
        return lambda height, width: [
            before,
            *[image] * (count_patches(height, width) * tokens),
            after,
        ]
    vision = config.vision_config
    outputs = (vision.image_size // vision.patch_size) ** 2
    outputs += vision.model_type == "clip_vision_model"  # the class token
    outputs -= config.vision_feature_select_strategy == "default"
    return lambda *_: [image] * outputs


def _tiles_in_rows(config: Any, directory: Path, image_processor: Any) -> ExpandImage:
    """Returns the expansion for rows of tiles, each with its number, and the whole image as the
    last one."""
    # The others are tokens in some vocabularies and plain text in others.
    around, whole = "<fake_token_around_image>", "<global-img>"
    tokenizer = _load_tokenizer(directory)
    _token_ids(tokenizer, directory, around)
    longest = image_processor.size["longest_edge"]
    tile = image_processor.max_image_size["longest_edge"]
    if longest % tile:
        raise BapoError(
            f"{directory}: its image processor scales images to {longest} pixels, of which tiles "
            f"of {tile} are no divisor; set size.longest_edge of preprocessor_config.json to a "
            "multiple"
        )
    image: str = tokenizer.convert_ids_to_tokens(int(config.image_token_id))
    vision = config.vision_config
    outputs = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def expand(height: int, width: int) -> list[int]:
        _, rows, columns = image_processor.get_number_of_image_patches(height, width, {})
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{around}<row_{row}_col_{column}>" + image * outputs
            text += "\n"
        text += "\n" if rows else ""
        text += f"{around}{whole}" + image * outputs + around
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    return expand


def _load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def _token_ids(tokenizer: Any, directory: Path, *tokens: str) -> list[int]:
    """Returns the ids of tokens that stand beside images. Raises `BapoError` if one is missing."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise BapoError(
            f"{directory}: its tokenizer has no token {missing[0]}, which stands beside images; "
            "give the tokenizer that belongs to the model"
        )
    return [vocabulary[token] for token in tokens]


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
    config = _read_config(directory)
    model_type = config.get("model_type")
    if (config.get("vision_config") or {}).get("model_type") == "pixtral":
        raise BapoError(
            f"model.path {directory}: its vision tower, pixtral, takes images of several sizes "
            "padded to one, which bapo does not support; choose another model"
        )
    if engine == "vllm" and model_type in set(ARCHITECTURES) - set(WITH_VLLM):
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


def vision_tower(base_model: Any) -> Any:
    """Returns the vision tower of a model without its output layer; None if it has none."""
    names = (
        name for name in ("visual", "vision_tower", "vision_model") if hasattr(base_model, name)
    )
    return next((getattr(base_model, name) for name in names), None)


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
