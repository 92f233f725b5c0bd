"""Plane geometry, whose problems are posed in part by a diagram.

A payload is {"images": [references], "problem": text, "answer": reference answer}, the columns of
Geometry3K as hiyouga/geometry3k has them. `<image>` in the problem marks where an image stands. The
answer of a response is found and compared as in the task `math`.

The task also generates problems, of angles and areas, with their diagrams.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from bapo_core.seeding import derive_rng
from bapo_core.tasks.base import Message, Payload, Verdict, draw_distinct
from bapo_core.tasks.diagrams import draw
from bapo_core.tasks.figures import KINDS, Figure, Kind, random_figure
from bapo_core.tasks.mathematics import INSTRUCTION, MathTask

IMAGE = "<image>"
"""Placeholder in a problem that marks where an image is shown."""
MIN_PIXELS, MAX_PIXELS = 56, 1024
"""Bounds of `pixels`: labels cannot be read in smaller diagrams."""

Template = Literal["boxed", "diagram"]


@dataclass(frozen=True, slots=True)
class GeometryTask:
    """Plane geometry with a prompt template and a distribution of generated problems."""

    name: ClassVar[str] = "geometry"
    columns: ClassVar[Sequence[str]] = ("images", "problem", "answer")
    image_columns: ClassVar[Sequence[str]] = ("images",)
    reward_parts: ClassVar[Sequence[str]] = MathTask.reward_parts

    template: Template = "boxed"
    r"""Prompt template. `boxed`: the problem and an instruction, for a chat model, whose answer is
    in the last \boxed{...}. `diagram`: the images alone, without the problem's text, whose response
    is the answer alone, for a tiny model."""
    instruction: str = INSTRUCTION
    """Text that follows the problem in the user message, with the template `boxed`."""
    boxed_only: bool = True
    r"""Whether an answer must be in a \boxed{...}, as the instruction asks."""
    ordered: bool = False
    """Whether the order of a list without brackets (`1, 2`) matters."""
    kinds: Sequence[Kind] = KINDS
    """Kinds of generated problems, all equally likely: triangle, parallel, circle, area."""
    pixels: int = 224
    """Width and height of a generated diagram."""
    label_grid: int | None = None
    """Texts of a generated diagram are centred on multiples of this many pixels. A small vision
    tower learns to read faster if texts meet its patches in few ways only. null: no grid."""

    def __post_init__(self) -> None:
        if self.template not in ("boxed", "diagram"):
            raise ValueError(f"template is {self.template!r}; choose boxed or diagram")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds is {self.kinds}; list some of {', '.join(KINDS)}")
        if not MIN_PIXELS <= self.pixels <= MAX_PIXELS:
            raise ValueError(
                f"pixels is {self.pixels}; choose a size from {MIN_PIXELS} to {MAX_PIXELS}"
            )
        if self.label_grid is not None and not 1 <= self.label_grid <= self.pixels // 8:
            raise ValueError(
                f"label_grid is {self.label_grid}; choose null or a number from 1 to "
                f"{self.pixels // 8}, an eighth of pixels"
            )

    def uid(self, payload: Payload) -> str:
        """Returns "geometry:<hash of the problem and its images>"."""
        digests = [image["digest"] for image in payload["images"]]
        content = json.dumps([payload["problem"].split(), digests])
        return f"geometry:{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns one user message, of images and texts in the problem's order."""
        images = iter(payload["images"])
        if self.template == "diagram":
            return [{"role": "user", "content": [{"type": "image", **image} for image in images]}]
        first, *rest = f"{payload['problem']}\n\n{self.instruction}".split(IMAGE)
        content: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
        for text in rest:
            content.append({"type": "image", **next(images)})
            if text:
                content.append({"type": "text", "text": text})
        return [{"role": "user", "content": content}]

    def warm_up(self) -> None:
        """Imports SymPy and builds the grammar's tables, which takes about a second."""
        self._grader.warm_up()

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Rewards an answer that equals `payload["answer"]`, numerically or symbolically."""
        if self.template == "diagram":
            response = rf"\boxed{{{response}}}"
        return self._grader.verify(payload, response)

    def explain_reference(self, payload: Payload) -> str | None:
        """Returns why a reference answer cannot be read as mathematics; None if it can."""
        return self._grader.explain_reference(payload)

    @property
    def _grader(self) -> MathTask:
        boxed_only = self.boxed_only or self.template == "diagram"
        return MathTask(boxed_only=boxed_only, ordered=self.ordered)

    def parse_row(self, row: Mapping[str, Any]) -> Payload | None:
        """Returns the problem of a row, or None for one without an answer.

        A column may hold one image instead of a list. Without `<image>` in the problem, its images
        come first. Raises `ValueError` for another number of `<image>` than of images, and as
        `MathTask.parse_row` does.
        """
        images = row["images"]
        if isinstance(images, Mapping):
            images = [images]
        if not isinstance(images, list) or not images:
            raise ValueError(f"images is {images!r:.80}; make it a list of at least one image")
        payload = self._grader.parse_row({column: row[column] for column in ("problem", "answer")})
        if payload is None:
            return None
        problem = payload["problem"]
        if IMAGE not in problem:
            problem = IMAGE * len(images) + problem
        if problem.count(IMAGE) != len(images):
            raise ValueError(
                f"the problem has {problem.count(IMAGE)} times {IMAGE}, but {len(images)} images; "
                "make them equally many"
            )
        return {"images": images, "problem": problem, "answer": payload["answer"]}

    def generate(self, seed: int, n: int) -> list[Payload]:
        """Returns n distinct problems. Raises `ValueError` if there are not as many."""
        return self._draw(derive_rng(seed, "geometry", "train"), n, set())

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        """Returns disjoint (train, test) problems; the test problems do not depend on `train`.

        No two of them have the same numbers in the same figure, however their diagrams are turned.
        """
        seen: set[tuple[str, ...]] = set()
        held_out = self._draw(derive_rng(seed, "geometry", "test"), test, seen)
        return self._draw(derive_rng(seed, "geometry", "train"), train, seen), held_out

    def _draw(self, rng: random.Random, n: int, seen: set[tuple[str, ...]]) -> list[Payload]:
        """Draws n problems whose keys are not in `seen`, and adds their keys to it."""

        def draw() -> tuple[tuple[str, ...], Figure]:
            figure = random_figure(rng.choice(self.kinds), rng)
            return figure.key, figure

        options = f"kinds={list(self.kinds)}; list more kinds"
        return [self._problem(figure) for figure in draw_distinct(draw, n, seen, options)]

    def _problem(self, figure: Figure) -> Payload:
        return {
            "images": [draw(figure.diagram, self.pixels, self.label_grid).png],
            "problem": figure.problem,
            "answer": str(figure.answer),
        }
