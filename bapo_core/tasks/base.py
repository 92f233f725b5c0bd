"""What a task is: how to pose a problem, and how to check an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Payload = Mapping[str, Any]
"""One problem, as JSON."""

Message = dict[str, str]
"""A chat message: {"role": ..., "content": ...}."""


class VerdictStatus(StrEnum):
    """How far the check of a response got. Only OK carries a reward."""

    OK = "ok"
    """The answer is right."""
    NO_ANSWER = "no_answer"
    """The response has no answer where one is expected."""
    TOO_LARGE = "too_large"
    """The answer is longer than any sensible one, and was not looked at."""
    PARSE_ERROR = "parse_error"
    """The answer is not in the task's grammar."""
    WRONG_NUMBERS = "wrong_numbers"
    """The expression does not use exactly the given numbers."""
    DIVISION_BY_ZERO = "division_by_zero"
    """The expression has no value."""
    WRONG_VALUE = "wrong_value"
    """The answer is well-formed and wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of checking a response: the reward, 0 or 1, and why."""

    reward: float
    status: str
    """A `VerdictStatus`, or a task's own: lower-case letters and underscores, at most 40."""
    answer: str | None = None
    """The answer found in the response, if there was one of a sensible size."""
    detail: str = ""
    """One line for a reader."""


@runtime_checkable
class Task(Protocol):
    """A kind of problem. Instances are immutable; options are given when one is made.

    A task may also have `warm_up() -> None`: the verifier calls it before the first deadline
    runs, so what takes long the first time (imports, tables) is done there.
    """

    @property
    def name(self) -> str: ...

    def uid(self, payload: Payload) -> str:
        """A stable name: the same problem has the same uid in every file and run."""
        ...

    def render(self, payload: Payload) -> list[Message]:
        """The conversation that poses the problem."""
        ...

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Checks a response. Raises nothing for any string, because a response is hostile input;
        only `MemoryError` may pass, for the verifier to see.
        """
        ...

    def load(self, path: str | Path, *, limit: int | None = None) -> list[Payload]:
        """Problems of a Parquet or JSONL file, at most `limit`. `ValueError` for a bad row."""
        ...


@runtime_checkable
class SyntheticTask(Task, Protocol):
    """A task whose problems can be made up."""

    def generate(self, seed: int, n: int) -> list[Payload]:
        """n distinct problems, a pure function of the seed and the task's options."""
        ...

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        """(train, test) problems, none in both. The test problems do not depend on `train`."""
        ...
