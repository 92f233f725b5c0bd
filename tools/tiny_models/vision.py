"""The tiny base model that reads images: small enough for a laptop, real enough to learn.

It is an ordinary Hugging Face directory with Qwen2.5-VL's architecture and a character tokenizer.
Its warm start on generated diagrams of the task `geometry` has two parts:

1. The vision tower learns to read numbers, with a label for each: in drawings full of them, and in
   diagrams of problems. From answers alone, reading would emerge after hours on two cores.
2. The language model learns to answer with an expression of the numbers in a diagram, such as
   180-40-75.

The prompt is the diagram alone: the problem's text would be most of the tokens, and says little
that the figure does not show.

The expression is drawn at random, whatever the problem: the model can read and knows no geometry,
so that its answers are seldom correct. docs/decisions/0011-images.md says how far it gets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from bapo_core.seeding import derive_rng, derive_seed
from bapo_core.tasks.diagrams import Diagram, Drawing, Label, draw
from bapo_core.tasks.figures import KINDS, random_figure
from bapo_core.tasks.geometry import GeometryTask
from services.common.images import decode_image
from services.model.vision import rope_positions
from tools.model_directory import write_directory
from tools.tiny_models.character_tokenizer import build_character_tokenizer
from tools.tiny_models.warm_start import (
    Progress,
    draw_batches,
    fit,
    pad_examples,
    two_threads,
)

TASK = GeometryTask(template="diagram", pixels=112, label_grid=7)
"""Distribution of the diagrams that the model can read."""

SPECIAL = ("<pad>", "<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
PAD, END, VISION_START, IMAGE, VISION_END, VIDEO = range(len(SPECIAL))
CHARACTERS = ("\n", "°", *map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)

WIDTH = 128
"""Width of the language model, and of what it gets from the vision tower."""
PATCH = 14
CELL = 2 * PATCH
"""Width and height in pixels of what one token of the language model sees."""
CELLS = TASK.pixels // CELL
PROMPT = (VISION_START, *[IMAGE] * CELLS**2, VISION_END)
"""Token ids of a prompt: the placeholders of one diagram."""

BATCH = 64
DRAWINGS = 24_000
"""Drawings for the first part of the warm start."""
NUMBERS = 1 / 3
"""Share of them that are full of numbers; the others are diagrams of problems."""
EXAMPLES = 40_000
"""Problems for the second part. With a quarter of them, the model learns their answers by heart."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of the parts of the warm start."""

    reading: int = 1_000
    answering: int = 4_000


def build_tiny_vision_model(
    directory: Path,
    *,
    seed: int,
    steps: Steps = Steps(),
    progress: Progress | None = None,
) -> None:
    """Trains the model and writes it to `directory`, all files or none, with bfloat16 weights.

    seed: determines the weights.
    steps: steps of the warm start.
    progress: called after each step with (steps done, all steps, loss).

    Raises `BapoError` if `directory` has files.
    """
    with write_directory(directory) as partial:
        tokenizer, processor = build_tokenizer(), _build_image_processor()
        model = _warm_start(tokenizer, seed, steps, progress)
        rounded: Any = model
        rounded.to(torch.bfloat16).save_pretrained(partial, safe_serialization=True)
        tokenizer.save_pretrained(partial)
        processor.save_pretrained(partial)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each character of ASCII and for the sign of degrees."""
    return build_character_tokenizer(
        SPECIAL, CHARACTERS, chat_template=CHAT_TEMPLATE, max_length=512
    )


def model_config(vocabulary_size: int) -> Qwen2_5_VLConfig:
    """Returns the configuration of a Qwen2.5-VL model with 2.2 M parameters."""
    depth = 4
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary_size,
            "hidden_size": WIDTH,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 4, 4],
            },
            "pad_token_id": PAD,
            "eos_token_id": END,
            "bos_token_id": None,
            "initializer_range": 0.08,
        },
        vision_config={
            "depth": depth,
            "hidden_size": 128,
            "num_heads": 4,
            "patch_size": PATCH,
            "intermediate_size": 384,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": list(range(depth)),
        },
        tie_word_embeddings=False,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def _build_image_processor() -> Any:
    """Builds the processor of images.

    White becomes 0. With the usual mean, all of a drawing but its few dark pixels would be large
    numbers, and reading would be learnt some ten times more slowly.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=2,
        min_pixels=CELL**2,
        max_pixels=(4 * TASK.pixels) ** 2,
        image_mean=[1.0] * 3,
        image_std=[0.25] * 3,
    )


def _warm_start(
    tokenizer: PreTrainedTokenizerFast, seed: int, steps: Steps, progress: Progress | None
) -> Qwen2_5_VLForConditionalGeneration:
    total = steps.reading + steps.answering
    done = count(1)

    def show(loss: float) -> None:
        if progress is not None:
            progress(next(done), total, loss)

    with two_threads():
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "tiny vision", "weights"))
            model = Qwen2_5_VLForConditionalGeneration(model_config(len(tokenizer)))
            reader = nn.Linear(WIDTH, _DIGITS * _SYMBOLS)
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=END, pad_token_id=PAD
        )
        model.train()
        tower = model.model.visual
        _learn_to_read(
            tower, reader, derive_rng(seed, "tiny vision", "reading"), steps.reading, show
        )
        rng = derive_rng(seed, "tiny vision", "answering")
        examples = _make_examples(tower, rng)
        _learn_to_answer(model, tokenizer, examples, rng, steps.answering, show)
        model.train(False)
    return model


# ---- reading ------------------------------------------------------------------------------------

_DIGITS = 3
"""Most digits of a number in a diagram."""
_SYMBOLS = 11
"""No digit, and ten digits."""


def _learn_to_read(
    tower: Any,
    reader: nn.Linear,
    rng: random.Random,
    steps: int,
    show: Callable[[float], None],
) -> None:
    """Trains the vision tower to tell the number in the middle of each cell, or that there is none.

    reader: a linear layer on the tower's output, which is thrown away.
    """
    drawings = [
        draw_numbers(rng) if index < NUMBERS * DRAWINGS else draw_problem(rng)
        for index in range(DRAWINGS)
    ]
    pixels = _Pixels([drawing.png for drawing in drawings])
    labels = torch.tensor([_digits_of_cells(drawing) for drawing in drawings])

    def losses() -> Iterator[Tensor]:
        for batch in draw_batches(len(drawings), BATCH, rng):
            seen = tower(*pixels[batch]).pooler_output
            logits = reader(seen).view(-1, _SYMBOLS)
            yield functional.cross_entropy(logits, labels[batch].flatten())

    fit([*tower.parameters(), *reader.parameters()], losses(), steps, show)


def draw_numbers(rng: random.Random) -> Drawing:
    """Draws numbers at random places, among lines and letters."""
    segments = [(0j, 1 + 1j) if rng.random() < 0.5 else (1j, 1 + 0j)]
    segments += [(_point(rng), _point(rng)) for _ in range(rng.randint(0, 3))]
    labels = []
    for column in range(4):
        for row in range(6):
            if rng.random() < 0.4:
                continue
            position = complex(column + rng.random() * 0.4, row + rng.random() * 0.4)
            position = complex(position.real / 3.4, position.imag / 5.4) * 1.1 - (0.05 + 0.05j)
            text = rng.choice("ABCDOmnx") if rng.random() < 0.2 else str(rng.randint(3, 199))
            if text.isdigit() and rng.random() < 0.7:
                text += "°"
            labels.append(Label(position, text, 0.5 + 0.5j))
    return draw(Diagram(segments=segments, labels=labels), TASK.pixels, TASK.label_grid)


def draw_problem(rng: random.Random) -> Drawing:
    """Draws the diagram of a problem of any kind."""
    figure = random_figure(rng.choice(KINDS), rng)
    return draw(figure.diagram, TASK.pixels, TASK.label_grid)


def _point(rng: random.Random) -> complex:
    return complex(rng.random(), rng.random())


def _digits_of_cells(drawing: Drawing) -> list[list[int]]:
    """Returns the digits of the number in each cell: [cells, 3], 0 for none, else the digit plus 1.

    -100, which the loss ignores, marks a cell with the middle of several texts.
    """
    digits = [[0] * _DIGITS for _ in range(CELLS * CELLS)]
    taken: set[int] = set()
    for column, row, text in drawing.texts:
        if not (0 <= column < TASK.pixels and 0 <= row < TASK.pixels):
            continue
        cell = _cell(column, row)
        if cell in taken:
            digits[cell] = [-100] * _DIGITS
            continue
        taken.add(cell)
        number = _number(text)
        if number is not None:
            digits[cell] = [
                0 if digit == " " else int(digit) + 1 for digit in str(number).ljust(_DIGITS)
            ]
    return digits


def _cell(column: float, row: float) -> int:
    """Returns the index of the cell of a pixel, in the order of the model's tokens."""
    return int(row) // CELL * CELLS + int(column) // CELL


def _number(text: str) -> int | None:
    """Returns the number that a text of a diagram shows, with or without the sign of degrees."""
    found = re.fullmatch(r"(\d+)°?", text)
    return int(found[1]) if found else None


# ---- answering ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Example:
    seen: Tensor
    """The image embeddings that the vision tower returns: [cells, width] float32."""
    numbers: Sequence[int]
    """The numbers in the diagram, in the order of the model's tokens."""


def _make_examples(tower: Any, rng: random.Random) -> list[_Example]:
    """Draws problems at random.

    The vision tower sees each of them once, because it no longer changes.
    """
    drawings = [draw_problem(rng) for _ in range(EXAMPLES)]
    pixels = _Pixels([drawing.png for drawing in drawings])
    examples = []
    for start in range(0, EXAMPLES, BATCH):
        batch = range(start, min(start + BATCH, EXAMPLES))
        with torch.no_grad():
            seen = tower(*pixels[batch]).pooler_output.view(len(batch), CELLS**2, -1)
        examples += [
            _Example(
                seen=cells,
                numbers=numbers_of(drawings[index]),
            )
            for index, cells in zip(batch, seen, strict=True)
        ]
    return examples


def numbers_of(drawing: Drawing) -> list[int]:
    """Returns the numbers in a diagram, in the order of the model's tokens."""
    texts = sorted(drawing.texts, key=lambda text: _cell(text[0], text[1]))
    numbers = [_number(text) for _, _, text in texts]
    return [number for number in numbers if number is not None]


def _learn_to_answer(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[_Example],
    rng: random.Random,
    steps: int,
    show: Callable[[float], None],
) -> None:
    """Trains the language model to answer with an expression of the numbers in the diagram."""
    grid = torch.tensor([[1, 2 * CELLS, 2 * CELLS]])

    def losses() -> Iterator[Tensor]:
        for batch in draw_batches(len(examples), BATCH, rng):
            chosen = [examples[index] for index in batch]
            tokens, labels = pad_examples(
                [
                    (
                        list(PROMPT),
                        [*tokenizer.encode(rng.choice(possible_answers(example.numbers))), END],
                    )
                    for example in chosen
                ]
            )
            # All rows have the same positions, because their images are equally large. Padding is
            # on the right, where no token of a response attends to it.
            positions, _ = rope_positions(
                model.model, tokens[:1], torch.ones_like(tokens[:1]), grid
            )
            embeddings = model.get_input_embeddings()(tokens)
            embeddings[tokens == IMAGE] = torch.cat([example.seen for example in chosen])
            output = model(
                inputs_embeds=embeddings,
                position_ids=positions.expand(-1, BATCH, -1),
                labels=labels,
            )
            yield output.loss

    language_model = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    fit(language_model, losses(), steps, show)


def possible_answers(numbers: Sequence[int]) -> list[str]:
    """Returns the expressions of one or two numbers that answer some problem."""
    if len(numbers) == 1:
        (a,) = numbers
        return [f"{a}", f"180-{a}", f"2*{a}", f"{a}/2"]
    a, b = numbers
    return [f"{a}+{b}", f"180-{a}-{b}", f"({a}+{b})/2", f"{a}*{b}", f"{a}*{b}/2"]


# ---- batches ------------------------------------------------------------------------------------


class _Pixels:
    """The pixel values of images of equal size, which are computed when a batch is taken."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self._images = images
        self._processor = _build_image_processor()

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the patches and the grids of images, as the model takes them."""
        images = [decode_image(self._images[index]) for index in batch]
        prepared = self._processor(images=images, return_tensors="pt")
        return prepared["pixel_values"], prepared["image_grid_thw"]
