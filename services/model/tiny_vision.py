"""The tiny base model that reads images: small enough for a laptop, real enough to learn.

It is an ordinary Hugging Face directory with Qwen2.5-VL's architecture and a character tokenizer.
Its warm start on generated diagrams of the task `geometry` has three parts:

1. The vision tower learns to read numbers in drawings full of them, with a label for each number.
   From answers alone, reading would emerge after hours on two cores.
2. The language model learns to answer with an expression of the numbers in a diagram, such as
   180-40-75, without the problem's text, which would be most of the tokens.
3. The same with the problem's text.

The expression is drawn at random, whatever the problem: the model can read and knows no geometry,
so that its answers are seldom correct. docs/decisions/0011-images.md says how far it gets.
"""

from __future__ import annotations

import io
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
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
from services.model.character_tokenizer import build_character_tokenizer
from services.model.tiny import pad_examples
from services.model.vision import rope_positions

TASK = GeometryTask(template="short", pixels=112, label_grid=7)
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

BATCH = 64
LEARNING_RATE = 2e-3
DRAWINGS = 4_000
"""Distinct drawings of numbers for the first part of the warm start."""
EXAMPLES = 10_000
"""Distinct problems for the other parts."""

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of the parts of the warm start."""

    reading: int = 250
    answering: int = 1_700
    """Steps on images alone, which are a third as long as those with the text of the problem."""
    answering_with_text: int = 150


def build_tiny_vision_model(
    directory: Path,
    *,
    seed: int,
    steps: Steps = Steps(),
    progress: Progress | None = None,
) -> None:
    """Trains the model and writes it to `directory`, all files or none.

    seed: determines the weights.
    steps: steps of the warm start.
    progress: called after each step with (steps done, all steps, loss).
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer, processor = build_tokenizer(), _build_image_processor()
    model = _warm_start(tokenizer, seed, steps, progress)
    model.save_pretrained(partial, safe_serialization=True)
    tokenizer.save_pretrained(partial)
    processor.save_pretrained(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


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
    threads = torch.get_num_threads()
    # The result of a reduction depends on the number of threads.
    torch.set_num_threads(2)
    total = steps.reading + steps.answering + steps.answering_with_text
    losses = 0

    def show(loss: float) -> None:
        nonlocal losses
        losses += 1
        if progress is not None:
            progress(losses, total, loss)

    try:
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
        examples = _make_examples(tower, tokenizer, rng)
        blind = [replace(example, text=[]) for example in examples]
        _learn_to_answer(model, tokenizer, blind, rng, steps.answering, show)
        _learn_to_answer(model, tokenizer, examples, rng, steps.answering_with_text, show)
        model.train(False)
    finally:
        torch.set_num_threads(threads)
    return model


def _fit(
    parameters: Sequence[nn.Parameter],
    losses: Iterator[Tensor],
    steps: int,
    show: Callable[[float], None],
) -> None:
    """Takes a step on each of the first `steps` losses."""
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
    drawings = [draw_numbers(rng) for _ in range(DRAWINGS)]
    pixels = _Pixels([drawing.png for drawing in drawings])
    labels = torch.tensor([_digits_of_cells(drawing) for drawing in drawings])

    def losses() -> Iterator[Tensor]:
        for batch in _batches(len(drawings), rng):
            seen = tower(*pixels[batch]).pooler_output
            logits = reader(seen).view(-1, _SYMBOLS)
            yield functional.cross_entropy(logits, labels[batch].flatten())

    _fit([*tower.parameters(), *reader.parameters()], losses(), steps, show)


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
    text: list[int]
    """Token ids of the problem's text."""
    numbers: Sequence[int]
    """The numbers in the diagram, in the order of the model's tokens."""


def _make_examples(
    tower: Any, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[_Example]:
    """Draws problems at random.

    The vision tower sees each of them once, because it no longer changes.
    """
    figures = [random_figure(rng.choice(KINDS), rng) for _ in range(EXAMPLES)]
    drawings = [draw(figure.diagram, TASK.pixels, TASK.label_grid) for figure in figures]
    pixels = _Pixels([drawing.png for drawing in drawings])
    examples = []
    for start in range(0, EXAMPLES, BATCH):
        batch = range(start, min(start + BATCH, EXAMPLES))
        with torch.no_grad():
            seen = tower(*pixels[batch]).pooler_output.view(len(batch), CELLS**2, -1)
        examples += [
            _Example(
                seen=cells,
                text=tokenizer.encode(figures[index].problem.removeprefix("<image>")),
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
        for batch in _batches(len(examples), rng):
            chosen = [examples[index] for index in batch]
            tokens, labels = pad_examples(
                [
                    (
                        [VISION_START, *[IMAGE] * CELLS**2, VISION_END, *example.text],
                        [*tokenizer.encode(rng.choice(possible_answers(example.numbers))), END],
                    )
                    for example in chosen
                ]
            )
            # The images come first and are equally large, so that all rows have the same positions.
            # Padding is on the right, where no token of a response attends to it.
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
    _fit(language_model, losses(), steps, show)


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
        self._images = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        self._processor = _build_image_processor()

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the patches and the grids of images, as the model takes them."""
        images = [self._images[index] for index in batch]
        prepared = self._processor(images=images, return_tensors="pt")
        return prepared["pixel_values"], prepared["image_grid_thw"]


def _batches(examples: int, rng: random.Random) -> Iterator[list[int]]:
    """Yields batches of indices without end, in a new order in each epoch."""
    while True:
        order = rng.sample(range(examples), examples)
        for start in range(0, examples - BATCH + 1, BATCH):
            yield order[start : start + BATCH]
