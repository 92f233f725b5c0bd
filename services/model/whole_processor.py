"""Prepares images of any image-text model with the processor that transformers has for it.

It serves the models that `services.model.vision` has no rules for. A processor tells which tokens
and which arguments a prompt has, but not which of them belong to an image. So the tokens of an
image are read from a prompt that holds nothing else, and a processor is refused if a longer prompt
shows that they, or the arguments, depend on the text or on other images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError
from services.common.errors import first_line
from services.model.load_errors import explain_load_error
from services.model.rendering import bounded_rendering

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Names of the outputs of a processor that describe tokens; all other outputs describe images."""


@dataclass(frozen=True)
class WholeProcessor:
    """The processor of one model, as transformers loads it."""

    processor: Any
    tokenizer: Any
    placeholder: str
    """Text with which the model's chat template renders an image."""
    _expanded: dict[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def load(
        cls, directory: Path, config: Any, image_processor: Any, tokenizer: Any
    ) -> WholeProcessor:
        """Loads the processor of a model directory.

        config: the model's configuration.
        image_processor: the one that processes images in place of the processor's own.

        Raises `BapoError` if the processor cannot be loaded, or does more than to put tokens in the
        place of each image.
        """
        from transformers import AutoProcessor

        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        in_three_dimensions = "mrope_section" in rope
        if in_three_dimensions or getattr(config, "is_encoder_decoder", False):
            kind = "an encoder for its prompts"
            if in_three_dimensions:
                kind = "positions in three dimensions"
            raise BapoError(
                f"{directory}: a model of the type {config.model_type} has {kind}, which bapo does "
                "not support for this type; choose another model"
            )
        try:
            auto: Any = AutoProcessor
            processor: Any = auto.from_pretrained(directory, trust_remote_code=False)
        except Exception as error:  # of any kind, as what the files say is any
            raise BapoError(
                f"{directory}: its processor cannot be loaded: {explain_load_error(error)}; give a "
                "directory with the processor_config.json of the model, and install what it names"
            ) from error
        processor.image_processor = image_processor
        whole = cls(processor, tokenizer, _find_placeholder(directory, processor, tokenizer))
        whole.check(directory)
        return whole

    def expand_image(self, height: int, width: int) -> str:
        """Returns the text of the tokens of an image of this size."""
        size = (height, width)
        if size not in self._expanded:
            token_ids = self._process(self.placeholder, [_blank_image(*size)])["input_ids"][0]
            self._expanded[size] = self.tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return self._expanded[size]

    def compute_arguments(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """Returns the arguments of the model, by name, for the images of one prompt."""
        return _arguments(self._process(self.placeholder * len(images), images))

    def _process(self, text: str, images: Sequence[Image]) -> Mapping[str, Any]:
        output: Mapping[str, Any] = self.processor(
            text=text, images=list(images), return_tensors="pt", add_special_tokens=False
        )
        return output

    def check(self, directory: Path) -> None:
        """Raises `BapoError` unless images and texts are independent of each other."""
        import torch

        sizes = [(64, 96), (224, 56)]
        images = [_blank_image(*size) for size in sizes]
        pieces = ["Before", " between", " after"]
        try:
            output = self._process(self.placeholder.join(pieces), images)
            expanded = [*(self.expand_image(*size) for size in sizes), ""]
            arguments = self.compute_arguments(images)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _unsupported(directory, first_line(error)) from error
        text = "".join(part for pair in zip(pieces, expanded, strict=True) for part in pair)
        if self.tokenizer.encode(text, add_special_tokens=False) != output["input_ids"][0].tolist():
            raise _unsupported(directory, "the tokens of an image depend on the text beside it")
        for name, value in _arguments(output).items():
            if not isinstance(value, torch.Tensor):
                raise _unsupported(directory, f"{name} is not a tensor")
            if not torch.equal(value, arguments[name]):
                raise _unsupported(directory, f"{name} depends on the text")


def _arguments(output: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in output.items() if name not in OF_TOKENS}


def _blank_image(height: int, width: int) -> Image:
    from PIL import Image

    return Image.new("RGB", (width, height))


def _find_placeholder(directory: Path, processor: Any, tokenizer: Any) -> str:
    """Returns the text of a processor's attribute with which the chat template renders an image."""
    message = {"role": "user", "content": [{"type": "image"}]}
    with bounded_rendering():
        rendered = tokenizer.apply_chat_template([message], tokenize=False)
    for name in ("image_token", "boi_token", "image_placeholder", "start_of_img_token"):
        text = str(getattr(processor, name, None) or "")
        if text and rendered.count(text) == 1:
            return text
    raise BapoError(
        f"{directory}: its chat template does not render an image as its processor expects it; "
        "give the chat template that belongs to the model"
    )


def _unsupported(directory: Path, reason: str) -> BapoError:
    return BapoError(
        f"{directory}: its processor prepares images in a way that bapo does not support "
        f"({reason}); choose another model"
    )
