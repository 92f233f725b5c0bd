"""Tasks with pseudo-random verdicts, so that the rewards of a run do not depend on its model.

A payload is {"number": int, "chance": float}. A response is correct with probability `chance`.
The verdict is a hash of the problem and the response, so it is deterministic, differs between the
responses of a group, and cannot be learnt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from bapo_core.tasks import Message, Payload, Verdict, VerdictStatus
from bapo_core.tasks.geometry import GeometryTask

CHANCES = (0.4, 0.4, 0.4, 1.0)
"""Probabilities of a correct response: of four successive problems, one is always solved."""


@dataclass(frozen=True, slots=True)
class ChanceTask:
    """Generates successive numbers as problems, whose probabilities cycle through `CHANCES`."""

    name: ClassVar[str] = "chance"
    columns: ClassVar[Sequence[str]] = ("number", "chance")

    wrong: float = 0.0
    """Reward of a wrong response."""

    def uid(self, payload: Payload) -> str:
        return f"chance:{payload['number']}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns a message that consists of tokens in the tiny model's vocabulary."""
        return [{"role": "user", "content": f"{payload['number']}:"}]

    def verify(self, payload: Payload, response: str) -> Verdict:
        if hash_to_uniform(payload["number"], response) < payload["chance"]:
            return Verdict(1.0, VerdictStatus.OK, response)
        return Verdict(self.wrong, VerdictStatus.WRONG_VALUE, response)

    def demonstrate(self, payload: Payload) -> str:
        """Returns the first number that is a correct response."""
        return next(str(n) for n in count() if self.verify(payload, str(n)).reward > 0)

    def parse_row(self, row: Mapping[str, Any]) -> Payload:
        return row

    def generate(self, seed: int, n: int) -> list[Payload]:
        return [build_problem(number) for number in range(1000 * seed, 1000 * seed + n)]

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        problems = self.generate(seed, test + train)
        return problems[test:], problems[:test]


@dataclass(frozen=True, slots=True)
class ChanceDiagramsTask:
    """The generated problems of `geometry` with their diagrams, whose verdicts are by chance."""

    name: ClassVar[str] = "chance_diagrams"
    columns: ClassVar[Sequence[str]] = GeometryTask.columns
    image_columns: ClassVar[Sequence[str]] = GeometryTask.image_columns

    geometry: GeometryTask = field(
        default_factory=lambda: GeometryTask(template="diagram", pixels=112)
    )

    def uid(self, payload: Payload) -> str:
        return self.geometry.uid(payload)

    def render(self, payload: Payload) -> list[Message]:
        return self.geometry.render(payload)

    def verify(self, payload: Payload, response: str) -> Verdict:
        if hash_to_uniform(int(payload["answer"]), response) < 0.4:
            return Verdict(1.0, VerdictStatus.OK, response)
        return Verdict(0.0, VerdictStatus.WRONG_VALUE, response)

    def parse_row(self, row: Mapping[str, Any]) -> Payload | None:
        return self.geometry.parse_row(row)

    def generate(self, seed: int, n: int) -> list[Payload]:
        return self.geometry.generate(seed, n)

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        return self.geometry.generate_split(seed, train=train, test=test)


def build_problem(number: int) -> dict[str, Any]:
    return {"number": number, "chance": CHANCES[number % len(CHANCES)]}


def hash_to_uniform(number: int, response: str) -> float:
    """Returns a number that is uniformly distributed in [0, 1) over the responses."""
    digest = hashlib.sha256(f"{number}:{response}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
