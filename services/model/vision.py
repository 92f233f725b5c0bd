"""Prepares prompts for models that read images: their token ids and their pixel values.

The architectures of `ARCHITECTURES` have three forms. Images of those in `ON_A_GRID` are patches on
a grid, with positions in three dimensions. Images of those in `OF_TILES` are one or several tiles
of equal size, with ordinary positions. Images of those in `OF_SIZES` have several sizes, and are
padded to one. In all forms, prompts have one placeholder token for each output of the vision tower
that the language model sees, and in some models further tokens around and between them. The
collector, the engines and the trainer all use this module, so that all have the same tokens and the
same pixels.

Images are processed with Pillow, not with torchvision: the two scale images slightly differently,
and a process with torchvision would compute other log-probs than one without. The processors of
transformers are not used as a whole for these architectures, because many of them also contain
video processors, which cannot be loaded without torchvision.

Image-text models of other types are prepared by the processor of transformers (`whole_processor`),
and their sequences are padded instead of packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError
from bapo_core.tasks import Message
from services.common.images import ImageReference, decode_image
from services.model.json_files import read_object
from services.model.load_errors import explain_load_error
from services.model.whole_processor import WholeProcessor

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

ON_A_GRID = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "glm46v"),
)
OF_TILES = ("internvl", "idefics3", "smolvlm", "gemma3")
OF_SIZES = ("mistral3", "gemma4")
ARCHITECTURES = (*ON_A_GRID, *OF_TILES, *OF_SIZES)
"""Types of the models with rules of their own, as `model_type` in config.json (`has_rules`)."""

WITH_VLLM = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    "internvl",
)
"""Those whose images vLLM takes as pixel values, beside token ids.

The placeholders of an image must follow one another.
"""

IN_ROWS = ("idefics3", "smolvlm")
"""Those that take the tiles of several texts, as (texts, tiles, channels, height, width)."""

BIDIRECTIONAL = ("gemma3", "gemma4")
"""Those in which the tokens of an image may attend to all tokens of this image. Of Gemma 4, larger
models do (`use_bidirectional_attention`)."""

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models that are 1 at the tokens of images and 0 elsewhere."""

IN_WINDOWS = ("gemma4",)
"""Those of `BIDIRECTIONAL` in which the tokens do so within sliding windows alone."""

SUBSTITUTE = 0
"""Token that is fed to a model in place of a sampled placeholder."""

OpenImage = Callable[[str], bytes]
"""Function that returns the bytes of an image by its digest."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """The images of one or of several prompts, in the form that a model takes them."""

    arguments: Mapping[str, Tensor]
    """Arguments of the model by their names. A model with rules (`has_rules`) takes:

    - `pixel_values`: float32; the patches of all images, in order, as (patches, channels x pixels
      of a patch); the tiles of all images, as (tiles, channels, height, width); or padded images,
      as (images, channels, height, width).
    - `image_grid_thw`: (images, 3) int64; patches of each image in time, height and width, of
      images on a grid.
    - `image_sizes`: (images, 2) int64; height and width of each image, of padded images.
    - `image_position_ids`: (images, patches, 2) int64; column and row of each patch, -1 at padding,
      where `pixel_values` are (images, patches, channels x pixels of a patch).
    """

    @property
    def grids(self) -> Tensor | None:
        """(images, 3) int64: patches of each image in time, height and width, on a grid."""
        return self.arguments.get("image_grid_thw")

    @classmethod
    def join(cls, parts: Sequence[Pixels]) -> Pixels:
        """Returns the images of all parts, in order; zeros pad those of several sizes."""
        return cls(
            {
                name: _concatenate([part.arguments[name] for part in parts])
                for name in parts[0].arguments
            }
        )

    def inputs_of(self, model: Any) -> dict[str, Tensor]:
        """Returns the arguments of `model`, for images of any number of texts."""
        inputs = dict(self.arguments)
        if model.config.model_type in IN_ROWS:
            inputs["pixel_values"] = inputs["pixel_values"][None]
        return inputs

    def to(self, device: torch.device) -> Pixels:
        """Returns a copy on `device`."""
        return Pixels({name: tensor.to(device) for name, tensor in self.arguments.items()})


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Returns all rows of all parts, padded with zeros to the longest part in each dimension."""
    import torch

    shape = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_pad(part, shape) for part in parts])


def _pad(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns `values` (N, ...), with zeros behind them up to the shape (N, *shape)."""
    padded = values.new_zeros(len(values), *shape)
    padded[(slice(None), *(slice(length) for length in values.shape[1:]))] = values
    return padded


ExpandImage = Callable[[int, int], str]
"""Function that returns the text that stands for an image, by its height and width."""


ComputePixels = Callable[[Sequence["Image"]], Pixels]
"""Function that returns the pixels of at least one image, all of one prompt."""


class VisionProcessor:
    """Prepares prompts and images for one model."""

    def __init__(
        self,
        placeholder: str,
        image_token: str,
        expand_image: ExpandImage,
        compute_pixels: ComputePixels,
    ) -> None:
        """placeholder: text with which chat templates render an image.
        image_token: text of the token that stands for an output of the vision tower.
        """
        self._placeholder, self._image_token = placeholder, image_token
        self._expand_image, self._compute_pixels = expand_image, compute_pixels

    @classmethod
    def load(cls, directory: Path) -> VisionProcessor:
        """Loads the processor of a model directory that `reads_images`.

        Raises `BapoError` if the processor or a package that it needs is missing.
        """
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        try:
            auto: Any = AutoImageProcessor
            processor: Any = auto.from_pretrained(directory, backend="pil", trust_remote_code=False)
        except Exception as error:  # of any kind, as what the files say is any
            raise BapoError(
                f"{directory}: its image processor cannot be loaded: {explain_load_error(error)}; "
                "give a directory with the preprocessor_config.json or processor_config.json of "
                "the model, and install what it names"
            ) from error
        try:
            config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            image_token: str = tokenizer.convert_ids_to_tokens(int(config.image_token_id))
        except Exception as error:
            raise BapoError(
                f"{directory}: its configuration or its tokenizer cannot be loaded: "
                f"{explain_load_error(error)}"
            ) from error
        if not has_rules(config):
            whole = WholeProcessor.load(directory, config, processor, tokenizer)
            return cls(
                whole.placeholder,
                image_token,
                whole.expand_image,
                lambda images: Pixels(whole.compute_arguments(images)),
            )
        placeholder = image_token
        if config.model_type == "gemma3":
            placeholder = tokenizer.convert_ids_to_tokens(int(config.boi_token_id))
        options = _division_options(config)
        expand_image = _expansion(config, directory, processor, tokenizer, image_token, options)
        return cls(
            placeholder, image_token, expand_image, partial(_compute_pixels, processor, options)
        )

    def expand(self, text: str, images: Sequence[ImageReference]) -> str:
        """Replaces the placeholder of each image by the text of its tokens.

        The tokens are written as text, because those around an image may join the text beside it:
        Gemma 3 has one token for several line breaks.

        text: a rendered prompt, with one placeholder for each image. Raises `BapoError` for another
        number of placeholders.
        """
        pieces = text.split(self._placeholder)
        placeholders = len(pieces) - 1
        if self._placeholder != self._image_token:
            placeholders += text.count(self._image_token)
        if placeholders != len(images):
            raise BapoError(
                f"the rendered prompt has {placeholders} placeholders for {len(images)} images; "
                "give a model whose chat template renders images, and remove the placeholder from "
                "the problem's text"
            )
        expanded = [self._expand_image(image["height"], image["width"]) for image in images]
        return "".join(part for pair in zip(pieces, [*expanded, ""], strict=True) for part in pair)

    def blank_image(self, height: int, width: int) -> tuple[str, Pixels]:
        """Returns the text of the tokens of a black image, and its pixels."""
        from PIL import Image

        blank = Image.new("RGB", (width, height))
        return self._expand_image(height, width), self._compute_pixels([blank])

    def pixels(self, images: Sequence[bytes]) -> Pixels:
        """Returns the pixel values of the image files of one prompt, of which there are some."""
        return self._compute_pixels([decode_image(data) for data in images])


def _compute_pixels(
    image_processor: Any, options: Mapping[str, Any], images: Sequence[Image]
) -> Pixels:
    """options: arguments with which the image processor divides an image."""
    prepared = image_processor(images=list(images), return_tensors="pt", **options)
    values = prepared["pixel_values"].float()
    arguments = {
        name: prepared[name].long()
        for name in ("image_grid_thw", "image_sizes", "image_position_ids")
        if name in prepared
    }
    if values.ndim == 5:  # of one text
        values = values.flatten(0, 1)
    return Pixels({"pixel_values": values, **arguments})


def has_rules(config: Any) -> bool:
    """Returns whether a model that reads images is prepared by this module's rules.

    Besides `ARCHITECTURES`, these are LLaVA models with the vision tower of Pixtral.
    """
    if config.model_type == "llava":
        return _has_pixtral_tower(config)
    return config.model_type in ARCHITECTURES


def _has_pixtral_tower(config: Any) -> bool:
    return bool(config.vision_config.model_type == "pixtral")


def patches_in_dense_attention(model: Any) -> int:
    """Returns the patches of each placeholder if the patches of all images attend in one mask.

    It is 0 for other models: their towers compute each image or tile by itself.
    """
    vision = getattr(model.config, "vision_config", None)
    if vision is None or vision.model_type != "pixtral":
        return 0
    return int(getattr(model.config, "spatial_merge_size", 1)) ** 2


def _division_options(config: Any) -> dict[str, Any]:
    """Returns the options that the processors of transformers give to their image processors."""
    if config.model_type == "internvl":
        return {"crop_to_patches": True}
    if _has_pixtral_tower(config):
        merged = getattr(config, "spatial_merge_size", 1)
        return {"patch_size": config.vision_config.patch_size * merged}
    return {}


def _expansion(
    config: Any,
    directory: Path,
    image_processor: Any,
    tokenizer: Any,
    image: str,
    options: Mapping[str, Any],
) -> ExpandImage:
    """Returns what writes the tokens of an image as the processor of transformers does.

    That processor itself may contain a video processor, which needs torchvision.
    """

    def count_patches(height: int, width: int) -> int:
        return int(image_processor.get_number_of_image_patches(height, width, dict(options)))

    if config.model_type in ON_A_GRID:
        merged = int(image_processor.merge_size) ** 2
        return lambda height, width: image * (count_patches(height, width) // merged)
    if config.model_type in IN_ROWS:
        return _tiles_in_rows(config, directory, image_processor, tokenizer, image)
    if config.model_type == "internvl":
        _require_tokens(tokenizer, directory, "<img>", "</img>")
        tokens = int(config.image_seq_length)
        return lambda height, width: (
            "<img>" + image * (count_patches(height, width) * tokens) + "</img>"
        )
    if config.model_type == "gemma4":
        return _patches_in_proportion(config, image_processor, tokenizer, image)
    if config.model_type == "gemma3":
        return _whole_image(config, directory, image_processor, tokenizer, image)
    merged = config.model_type == "mistral3"
    return _rows_of_patches(directory, image_processor, tokenizer, image, options, merged)


def _tiles_in_rows(
    config: Any, directory: Path, image_processor: Any, tokenizer: Any, image: str
) -> ExpandImage:
    """Returns the expansion for rows of tiles, each with its number, and the whole image as the
    last one."""
    # The others are tokens in some vocabularies and plain text in others.
    around, whole = "<fake_token_around_image>", "<global-img>"
    _require_tokens(tokenizer, directory, around)
    longest = image_processor.size["longest_edge"]
    tile = image_processor.max_image_size["longest_edge"]
    if longest % tile:
        raise BapoError(
            f"{directory}: its image processor scales images to {longest} pixels, of which tiles "
            f"of {tile} are no divisor; set size.longest_edge of preprocessor_config.json to a "
            "multiple"
        )
    vision = config.vision_config
    outputs = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def expand(height: int, width: int) -> str:
        _, rows, columns = image_processor.get_number_of_image_patches(height, width, {})
        text: str = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{around}<row_{row}_col_{column}>" + image * outputs
            text += "\n"
        text += "\n" if rows else ""
        text += f"{around}{whole}" + image * outputs + around
        return text

    return expand


def _whole_image(
    config: Any, directory: Path, image_processor: Any, tokenizer: Any, image: str
) -> ExpandImage:
    """Returns the expansion for images of one tile, between marks and blank lines."""
    if image_processor.do_pan_and_scan:
        raise BapoError(
            f"{directory}: its image processor cuts images of unequal sides into further tiles, "
            "which bapo does not support; set do_pan_and_scan of preprocessor_config.json to false"
        )
    before, after = (
        tokenizer.convert_ids_to_tokens(int(token_id))
        for token_id in (config.boi_token_id, config.eoi_token_id)
    )
    text = f"\n\n{before}{image * config.mm_tokens_per_image}{after}\n\n"
    return lambda *_: text


def _patches_in_proportion(
    config: Any, image_processor: Any, tokenizer: Any, image: str
) -> ExpandImage:
    """Returns the expansion for images scaled to about the same area, between marks."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    before, after = (
        tokenizer.convert_ids_to_tokens(int(token_id))
        for token_id in (config.boi_token_id, config.eoi_token_id)
    )
    patch, pooled = image_processor.patch_size, image_processor.pooling_kernel_size

    def expand(height: int, width: int) -> str:
        scaled = get_aspect_ratio_preserving_size(
            height=height,
            width=width,
            patch_size=patch,
            max_patches=image_processor.max_soft_tokens * pooled**2,
            pooling_kernel_size=pooled,
        )
        outputs = (scaled[0] // patch) * (scaled[1] // patch) // pooled**2
        text: str = before + image * outputs + after
        return text

    return expand


def _rows_of_patches(
    directory: Path,
    image_processor: Any,
    tokenizer: Any,
    image: str,
    options: Mapping[str, Any],
    merged: bool,
) -> ExpandImage:
    """Returns the expansion for rows of patches, each with a mark at its end.

    merged: whether the model merges patches; it then fails for an image of a single output.
    """
    import numpy
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    row_end, image_end = "[IMG_BREAK]", "[IMG_END]"
    _require_tokens(tokenizer, directory, row_end, image_end)
    side: int = options["patch_size"]
    longest = int(image_processor.size["longest_edge"])

    def expand(height: int, width: int) -> str:
        scaled_height, scaled_width = get_resize_output_image_size(
            numpy.broadcast_to(0, (3, height, width)),
            size=longest,
            patch_size=side,
            input_data_format=ChannelDimension.FIRST,
        )
        rows, columns = scaled_height // side, scaled_width // side
        if rows == columns == 1 and merged:
            raise BapoError(
                f"an image of {width} x {height} pixels is too small for the model, which needs "
                f"more than {side} x {side}; enlarge it, or remove its prompt"
            )
        return row_end.join([image * columns] * rows) + image_end

    return expand


def _require_tokens(tokenizer: Any, directory: Path, *tokens: str) -> None:
    """Raises `BapoError` if a token that stands beside images is missing."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise BapoError(
            f"{directory}: its tokenizer has no token {missing[0]}, which stands beside images; "
            "give the tokenizer that belongs to the model"
        )


def reads_images(directory: Path) -> bool:
    """Returns whether the model of a directory is one that reads images."""
    return _is_image_text_type(str(read_config(directory).get("model_type")))


@lru_cache
def _is_image_text_type(model_type: str) -> bool:
    """Returns whether models of a type read images.

    Those that transformers also knows as language models alone do only if they are of
    `ARCHITECTURES`, because sequences of other image-text models are not packed.
    """
    from transformers.models.auto import modeling_auto

    return model_type in ARCHITECTURES or (
        model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


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
    config = read_config(directory)
    model_type = str(config.get("model_type"))
    reads = _is_image_text_type(model_type)
    if engine == "vllm" and reads and model_type not in WITH_VLLM:
        raise BapoError(
            f"model.path {directory}: vLLM does not take images of a model of the type "
            f"{model_type} together with token ids; set rollout.engine to transformers, or choose "
            "another model"
        )
    if not reads:
        raise BapoError(
            f"model.path {directory}: the prompts have images, but a model of the type "
            f"{model_type} has no vision tower that bapo supports; choose one of the types "
            f"{', '.join(ARCHITECTURES)}, or another image-text model"
        )
    VisionProcessor.load(directory)


def fed_tokens(model: Any, response_tokens: Tensor) -> Tensor:
    """Returns the tokens that are fed to `model` for tokens of responses.

    A model may sample the placeholder of an image, for which there is no image. Engine and trainer
    alike feed `SUBSTITUTE` in its place, so that their log-probs agree.
    """
    if not hasattr(model.config, "vision_config"):
        return response_tokens
    sampled = response_tokens == model.config.image_token_id
    return response_tokens.masked_fill(sampled, SUBSTITUTE)


def number_images(model: Any, tokens: Tensor) -> Tensor | None:
    """Returns the number of the image that each token belongs to, from 1 on, and 0 for text.

    model: if the tokens of an image do not attend to each other in it, the result is None.
    tokens: (N, L), without sampled placeholders. The result has the same shape, and counts the
    images of each row.
    """
    config = model.config
    if config.model_type not in BIDIRECTIONAL:
        return None
    if config.model_type == "gemma4" and config.text_config.use_bidirectional_attention != "vision":
        return None
    is_image = tokens == model.config.image_token_id
    starts = is_image.clone()
    starts[:, 1:] &= ~is_image[:, :-1]
    numbers: Tensor = starts.cumsum(dim=1) * is_image
    return numbers


def token_types(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Returns the arguments that tell a model which of `tokens` (N, L) belong to images.

    They are empty for models that take none, and for models with rules that need none.
    """
    model_type = model.config.model_type
    if not _is_image_text_type(model_type):
        return {}
    if has_rules(model.config) and number_images(model, tokens) is None:
        return {}
    accepted = signature(model.base_model.forward).parameters
    is_image = (tokens == model.config.image_token_id).long()
    return {name: is_image for name in TOKEN_TYPES if name in accepted}


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


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the content of config.json; empty if there is none, or a damaged one."""
    try:
        return read_object(directory / "config.json")
    except (OSError, BapoError):
        return {}  # The function that loads the model reports what is wrong with the file.
