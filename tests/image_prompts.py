"""Prompts with images, of several numbers and sizes, for tests of engines and trainers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bapo_core.seeding import derive_rng
from bapo_core.tasks.diagrams import draw
from bapo_core.tasks.figures import random_figure
from bapo_core.tasks.geometry import GeometryTask
from services.common.images import check_image
from services.model.conversation import tokenize_conversation
from services.model.vision import VisionProcessor
from services.rollout.api.wire import PromptRequest

TASK = GeometryTask(instruction="Answer.")


def diagram(seed: int, pixels: int = 112) -> bytes:
    return draw(random_figure("triangle", derive_rng(seed, "test")).diagram, pixels).png


IMAGES = {
    hashlib.sha256(data).hexdigest(): data
    for data in (diagram(0), diagram(1, 56), diagram(2, 168), diagram(3))
}


def payload(digests: Sequence[str], problem: str) -> dict[str, Any]:
    images = []
    for digest in digests:
        facts = check_image(IMAGES[digest])
        images.append({"digest": digest, "width": facts.width, "height": facts.height})
    return {"images": images, "problem": problem, "answer": "1"}


def payloads() -> list[dict[str, Any]]:
    """Returns problems of one and of several images, of several sizes, and one without."""
    first, second, third, fourth = IMAGES
    return [
        payload([first], "<image>Find x."),
        payload([second, third], "In <image> and <image>"),
        payload([], "No image"),
        payload([fourth], "A longer text before <image>x"),
    ]


def prompts_of(directory: Path) -> list[PromptRequest]:
    tokenizer, vision = AutoTokenizer.from_pretrained(directory), VisionProcessor.load(directory)
    return [
        PromptRequest(
            prompt_token_ids=tokenize_conversation(tokenizer, TASK.render(problem), vision),
            images=[image["digest"] for image in problem["images"]],
            seed=100 + index,
        )
        for index, problem in enumerate(payloads())
    ]
