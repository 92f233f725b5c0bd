"""A task whose reward is any number and has no notion of correct.

A payload is {"number": int}. The reward of a response is a hash of the problem and the response
between 0 and 1.5, so that it is deterministic, differs between responses, and cannot be learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bapo_chance import hash_to_uniform

from bapo_core.tasks import Message, Payload, Verdict


@dataclass(frozen=True, slots=True)
class ScoresTask:
    """Generates successive numbers as problems."""

    name: ClassVar[str] = "scores"
    columns: ClassVar[Sequence[str]] = ("number",)

    status: str = "scored"
    """The status of every verdict."""

    def uid(self, payload: Payload) -> str:
        return f"scores:{payload['number']}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns a message that consists of tokens in the tiny model's vocabulary."""
        return [{"role": "user", "content": f"{payload['number']}:"}]

    def verify(self, payload: Payload, response: str) -> Verdict:
        return Verdict(1.5 * hash_to_uniform(payload["number"], response), self.status)

    def parse_row(self, row: Mapping[str, Any]) -> Payload:
        return row

    def generate(self, seed: int, n: int) -> list[Payload]:
        return [{"number": number} for number in range(1000 * seed, 1000 * seed + n)]

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        problems = self.generate(seed, test + train)
        return problems[test:], problems[:test]
