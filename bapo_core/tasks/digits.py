"""Tasks on the digits of a number, for comparisons of methods. Longer numbers are harder.

A model that answers short numbers correctly has prompts of every difficulty, and reinforcement
learning improves it within minutes. A payload is {"digits": text of 1 to 24 digits}.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bapo_core.seeding import derive_rng
from bapo_core.tasks.base import Message, Payload, Verdict, VerdictStatus, draw_distinct

MAX_LENGTH = 24
"""Most digits of a problem."""


@dataclass(frozen=True, slots=True)
class DigitsTask(ABC):
    """A task on digits, with a distribution of generated problems."""

    name: ClassVar[str]
    right: ClassVar[str]
    """Noun phrase that names the right answer in the detail of a verdict."""
    columns: ClassVar[Sequence[str]] = ("digits",)

    min_length: int = 4
    """Fewest digits of a generated problem."""
    max_length: int = 10
    """Most digits of a generated problem; all lengths are equally likely."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length <= MAX_LENGTH:
            raise ValueError(
                f"min_length is {self.min_length} and max_length {self.max_length}; give "
                f"1 <= min_length <= max_length <= {MAX_LENGTH}"
            )

    @abstractmethod
    def solve(self, digits: str) -> str:
        """Returns the right answer."""

    def uid(self, payload: Payload) -> str:
        return f"{self.name}:{payload['digits']}"

    def render(self, payload: Payload) -> list[Message]:
        return [{"role": "user", "content": f"{payload['digits']}="}]

    def verify(self, payload: Payload, response: str) -> Verdict:
        answer = response.strip()
        if answer == self.solve(payload["digits"]):
            return Verdict(1.0, VerdictStatus.OK, answer)
        if not (answer.isascii() and answer.isdigit()):
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, None, "the answer is not digits alone")
        return Verdict(
            0.0, VerdictStatus.WRONG_VALUE, answer[: 2 * MAX_LENGTH], f"not {self.right}"
        )

    def parse_row(self, row: Mapping[str, Any]) -> Payload | None:
        digits = row["digits"]
        if not (
            isinstance(digits, str)
            and digits.isascii()
            and digits.isdigit()
            and len(digits) <= MAX_LENGTH
        ):
            raise ValueError(f"digits is {digits!r}; give a text of 1 to {MAX_LENGTH} digits")
        return {"digits": digits}

    def demonstrate(self, payload: Payload) -> str:
        return self.solve(payload["digits"])

    def generate(self, seed: int, n: int) -> list[Payload]:
        return self._draw(derive_rng(seed, self.name, "train"), n, set())

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        seen: set[str] = set()
        held_out = self._draw(derive_rng(seed, self.name, "test"), test, seen)
        return self._draw(derive_rng(seed, self.name, "train"), train, seen), held_out

    def random_digits(self, rng: random.Random) -> str:
        """Draws the digits of a problem."""
        length = rng.randint(self.min_length, self.max_length)
        return "".join(rng.choice("0123456789") for _ in range(length))

    def _draw(self, rng: random.Random, n: int, seen: set[str]) -> list[Payload]:
        """Draws n problems whose uids are not in `seen`, and adds their uids to it."""

        def draw() -> tuple[str, Payload]:
            problem = {"digits": self.random_digits(rng)}
            return self.uid(problem), problem

        options = f"lengths {self.min_length} to {self.max_length}; raise max_length"
        return draw_distinct(draw, n, seen, options)


@dataclass(frozen=True, slots=True)
class SortingTask(DigitsTask):
    """Asks for the digits in ascending order: `83125=` -> `12358`."""

    name: ClassVar[str] = "sorting"
    right: ClassVar[str] = "the sorted digits"

    def solve(self, digits: str) -> str:
        return "".join(sorted(digits))


@dataclass(frozen=True, slots=True)
class DistinctTask(DigitsTask):
    """Asks for each digit once, in the order of first appearance: `3313927=` -> `31927`."""

    name: ClassVar[str] = "distinct"
    right: ClassVar[str] = "the distinct digits"

    def solve(self, digits: str) -> str:
        return "".join(dict.fromkeys(digits))
