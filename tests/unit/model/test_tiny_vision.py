"""The tiny base model that reads images: its directory, its reproducibility, what it can do."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from bapo_core.tasks.diagrams import Drawing, draw
from bapo_core.tasks.figures import KINDS, random_figure
from bapo_core.tasks.geometry import GeometryTask
from services.cli.evaluate import blank_image_opener, evaluate_directory
from services.common.images import decode_image
from services.model.resolve import TINY_VISION_MODEL
from services.model.vision import VisionProcessor
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine
from tools.tiny_models import vision as tiny_vision
from tools.tiny_models.vision import TASK, Steps, draw_problem, numbers_of, possible_answers


def build(directory: Path, *, seed: int) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_vision, "BATCH", 8)
        patch.setattr(tiny_vision, "DRAWINGS", 8)
        patch.setattr(tiny_vision, "EXAMPLES", 12)
        tiny_vision.build_tiny_vision_model(directory, seed=seed, steps=Steps(1, 2))
    return directory


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny-vision") / "model", seed=0)


def test_a_seed_is_a_model(built: Path, tmp_path: Path) -> None:
    weights = load_file(built / "model.safetensors")
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    again = load_file(build(tmp_path / "again", seed=0) / "model.safetensors")
    other = load_file(build(tmp_path / "other", seed=1) / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert any(not torch.equal(weights[name], other[name]) for name in weights)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_the_directory_is_an_ordinary_model(built: Path) -> None:
    weights = load_file(built / "model.safetensors")
    assert 2.0e6 < sum(tensor.numel() for tensor in weights.values()) < 2.5e6
    assert json.loads((built / "config.json").read_text())["model_type"] == "qwen2_5_vl"
    assert not list(built.parent.glob("*.partial"))


def test_the_tokenizer_gives_back_problems_and_answers(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    for text in ("The lines m and n are parallel. Find x.", "(40+60)/2", "110°"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_cell_of_the_recipe_is_a_token_of_the_model(built: Path) -> None:
    vision = VisionProcessor.load(built)
    reference = {"digest": "a" * 64, "width": TASK.pixels, "height": TASK.pixels}
    expanded = vision.expand("<|image_pad|>", [reference])  # type: ignore[list-item]
    assert expanded.count("<|image_pad|>") == tiny_vision.CELLS**2 == 16


def test_numbers_are_labels_of_the_cells_that_hold_their_middle() -> None:
    texts = [(0, 0, "7"), (56, 35, "120°"), (60, 40, "B"), (111, 111, "x"), (28, 84, "45")]
    digits = tiny_vision._digits_of_cells(Drawing(b"", texts))
    assert digits[0] == [8, 0, 0]
    assert digits[6] == [-100] * 3, "two texts in one cell"
    assert digits[13] == [5, 6, 0]
    assert sum(map(any, digits)) == 3


def test_drawings_of_numbers_are_full_of_them() -> None:
    for seed in range(20):
        drawing = tiny_vision.draw_numbers(random.Random(seed))
        digits = tiny_vision._digits_of_cells(drawing)
        assert sum(cell[0] > 0 for cell in digits) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_the_possible_answers_is_correct(kind: str) -> None:
    """The base model can stumble on the answer of every problem, and misses it most of the time."""
    rng, task = random.Random(3), GeometryTask(template="diagram")
    for _ in range(30):
        figure = random_figure(kind, rng)  # type: ignore[arg-type]
        answers = possible_answers(numbers_of(draw(figure.diagram, TASK.pixels, TASK.label_grid)))
        payload = {"answer": str(figure.answer)}
        correct = [task.verify(payload, answer).reward == 1 for answer in answers]
        assert 1 <= sum(correct) < len(correct)


def test_the_model_is_evaluated_with_its_images_and_without(built: Path) -> None:
    options = "task.options={template: diagram, pixels: 112, label_grid: 7}"
    config = load_config(
        None,
        ["task.name=geometry", options, "task.train_prompts=256", "task.test_prompts=4"]
        + ["rollout.max_response_tokens=4", "evaluation.samples=2"],
    )
    for blank in (False, True):
        (evaluation,) = evaluate_directory(config, built, blank_images=blank)
        assert evaluation.prompts == sum(evaluation.bins) == 4


def test_the_bundled_model_reads_numbers() -> None:
    """At least half of the sampled answers are expressions of exactly the diagram's numbers.

    A model that does not see the diagram would have to guess these numbers.
    """
    rng = random.Random(17)
    drawings = [draw_problem(rng) for _ in range(32)]
    tokenizer = AutoTokenizer.from_pretrained(TINY_VISION_MODEL)
    images = {str(index): drawing.png for index, drawing in enumerate(drawings)}
    prompt = list(tiny_vision.PROMPT)
    engine = TransformersEngine(open_image=images.__getitem__)
    engine.load(TINY_VISION_MODEL, 1)
    groups = engine.generate(
        [PromptRequest(prompt_token_ids=prompt, images=[name], seed=7) for name in images],
        Sampling(temperature=1.0, max_tokens=16, group_size=4),
        policy_version=1,
    )
    answers = [
        tokenizer.decode(response.token_ids, skip_special_tokens=True) in possible_answers(numbers)
        for group in groups
        for numbers in [numbers_of(drawings[group.index])]
        for response in group.responses
    ]
    assert len(answers) == 128
    assert sum(answers) >= 64


def test_a_blank_image_is_white_and_of_the_same_size() -> None:
    drawn = tiny_vision.draw_numbers(random.Random(0)).png
    image = decode_image(blank_image_opener({"a": drawn}.__getitem__)("a"))
    assert image.size == decode_image(drawn).size == (112, 112)
    assert image.getextrema() == ((255, 255),) * 3


def test_images_that_are_not_there_cannot_be_blank(small_model: Path) -> None:
    config = load_config(None, ["task.options={template: short}", "task.test_prompts=2"])
    message = re.escape("no prompt has an image; leave out --blank-images")
    with pytest.raises(BapoError, match=message):
        evaluate_directory(config, small_model, blank_images=True)
