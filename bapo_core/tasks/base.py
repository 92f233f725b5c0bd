"""The protocol of a task, which renders problems as prompts and verifies responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

from bapo_core.thresholds import at_least

Payload = Mapping[str, Any]
"""A problem, as a JSON object."""

Message = dict[str, Any]
"""A chat message: {"role": ..., "content": ...}.

The content is text, or for a prompt with images a list of parts in the form of transformers' chat
templates: {"type": "text", "text": ...} and {"type": "image", **reference}.
"""


DEMONSTRATION = "demonstration"
"""Key of a payload, and column of a data set, that holds a correct response to the problem."""

MAX_REWARD = float((2 - 2**-23) * 2**127)
"""Largest reward and part of a reward: the largest float32, in which they are stored."""

Key = TypeVar("Key")
Drawn = TypeVar("Drawn")

_MAX_MISSES = 20_000
"""Consecutive draws without a new problem after which the space of problems counts as exhausted."""


class VerdictStatus(StrEnum):
    """The outcome of verifying a response; only OK counts as correct (`is_solved`)."""

    OK = "ok"
    """The answer is correct."""
    NO_ANSWER = "no_answer"
    """The response has no answer in the place where the task expects one."""
    TOO_LARGE = "too_large"
    """The answer exceeds the length limit and was not parsed."""
    PARSE_ERROR = "parse_error"
    """The answer does not parse in the task's grammar."""
    WRONG_NUMBERS = "wrong_numbers"
    """The expression does not use exactly the numbers of the problem."""
    DIVISION_BY_ZERO = "division_by_zero"
    """The expression divides by zero and has no value."""
    WRONG_VALUE = "wrong_value"
    """The answer is well-formed and incorrect."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a response: its reward, whether it is correct, and the reason."""

    reward: float
    """Any finite number: usually 1 for a correct answer, 0 for another, and partial credit in
    between (`reward.correct` and `reward.wrong` of the configuration rescale it)."""
    status: str
    """A `VerdictStatus`, or a status of the task: at most 40 lower-case letters and underscores.
    The response is correct, for the difficulty k/G of its prompt, if it is OK, unless
    `task.solved_at` of the configuration decides it by the reward."""
    answer: str | None = None
    """The answer extracted from the response, if there is one within the length limit."""
    detail: str = ""
    """An explanation of the status, on one line."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further parts of the reward by name, which `reward.weights` of the configuration weighs."""


def is_solved(reward: float, status: str, solved_at: float | None) -> bool:
    """Returns whether a verdict counts as correct, for the accuracy k/G of its group.

    reward: what the task gave. solved_at: `task.solved_at`, the reward from which on a verdict
    counts; None where its status `ok` says so.
    """
    return status == VerdictStatus.OK if solved_at is None else at_least(reward, solved_at)


def with_format(verdict: Verdict) -> Verdict:
    """Returns the verdict with the part `format`: 1 for a response that has an answer, else 0."""
    has_answer = verdict.status not in (VerdictStatus.NO_ANSWER, VerdictStatus.TOO_LARGE)
    return replace(verdict, parts={"format": float(has_answer)})


@runtime_checkable
class Task(Protocol):
    """A kind of problem. Instances are immutable and are constructed with the task's options.

    A constructor raises `ValueError` or `TypeError` for an option that it refuses. A task may also
    have `warm_up() -> None`, for slow imports and tables, which the verifier calls before the first
    deadline starts; `load(payload) -> None`, for slow preparations of a payload, which it calls
    before the deadline of the first response to it starts, and which may raise `PayloadError`;
    `reward_parts: Sequence[str]`, the names of the parts of its verdicts;
    `takes_all_columns: bool`, whether `parse_row` gets the columns beside `columns`, too;
    `normalise(answer) -> str`, for `normalise_answer`, in linear time;
    `demonstrate(payload) -> str | None`, for `compose_demonstration`; and
    `explain_reference(payload) -> str | None`, for `explain_reference`.
    """

    @property
    def name(self) -> str:
        """The name of the task in configurations."""
        ...

    def uid(self, payload: Payload) -> str:
        """Returns the uid of a problem, which is equal in all files and runs."""
        ...

    def render(self, payload: Payload) -> list[Message]:
        """Returns the conversation that poses the problem.

        A last message of the assistant is the beginning of the response, which continues it; it is
        not part of what `verify` gets.
        """
        ...

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Verifies a response, which is hostile input.

        Raises nothing, whatever the response is, except `MemoryError`, which the verifier handles,
        and `PayloadError` for a payload against which no response can be verified.
        """
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a data set that a problem is made of."""
        ...

    def parse_row(self, row: Mapping[str, Any]) -> Payload | None:
        """Returns the problem of a row of a data set, or None to leave the row out.

        row: value of each of `columns`. A row without an answer is left out, because no response to
        it can be verified. Raises `ValueError` for a row that is not a problem of the task.
        """
        ...


def normalise_answer(task: Task, answer: str | None) -> str:
    """Returns an extracted answer in a form that equal answers share, for majority votes.

    It is the task's own form, if it has `normalise`, or else the answer without blanks. Empty
    without an answer.
    """
    if answer is None:
        return ""
    normalise: Callable[[str], str] | None = getattr(task, "normalise", None)
    return "".join(answer.split()) if normalise is None else normalise(answer)


def explain_reference(task: Task, payload: Payload) -> str | None:
    """Returns why the task cannot read the reference answer of a problem, on one line, or None.

    Only a task that has `explain_reference` tells. Such a problem can be posed, but right answers
    to it may be refused.
    """
    explain: Callable[[Payload], str | None] | None = getattr(task, "explain_reference", None)
    return None if explain is None else explain(payload)


def compose_demonstration(task: Task, payload: Payload) -> str | None:
    """Returns a correct response to a problem that the task composes itself, or None.

    Only a task that has `demonstrate` does; demonstrations are otherwise a column of the data.
    """
    demonstrate: Callable[[Payload], str | None] | None = getattr(task, "demonstrate", None)
    return None if demonstrate is None else demonstrate(payload)


def draw_distinct(
    draw: Callable[[], tuple[Key, Drawn] | None],
    n: int,
    seen: set[Key],
    options: str,
    max_misses: int = _MAX_MISSES,
) -> list[Drawn]:
    """Draws n problems whose keys are not in `seen`, and adds their keys to it.

    draw: returns a key and its problem, or None for a draw without a valid problem. options: the
    task's options that bound the space of problems, with the remedy, for the error.

    Raises `ValueError` when `max_misses` consecutive draws give no new problem.
    """
    problems: list[Drawn] = []
    misses = 0
    while len(problems) < n:
        drawn = draw()
        if drawn is None or drawn[0] in seen:
            misses += 1
            if misses == max_misses:
                raise ValueError(
                    f"found {len(seen)} distinct problems and no further one in {max_misses:,} "
                    f"draws, with {options}, or lower task.train_prompts or task.test_prompts"
                )
            continue
        misses = 0
        key, problem = drawn
        seen.add(key)
        problems.append(problem)
    return problems


@runtime_checkable
class SyntheticTask(Task, Protocol):
    """A task that generates its own problems."""

    def generate(self, seed: int, n: int) -> list[Payload]:
        """Returns n distinct problems, a pure function of the seed and the task's options.

        Raises `ValueError` if there are not as many.
        """
        ...

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        """Returns disjoint (train, test) problems; the test problems do not depend on `train`."""
        ...


@runtime_checkable
class ImageTask(Task, Protocol):
    """A task whose prompts hold images.

    Its payloads refer to images: {"digest": SHA-256 of the file, "width": pixels, "height": pixels}
    in a list `payload["images"]`. `parse_row` gets such references in place of the images of a row.
    A `SyntheticTask` generates payloads that hold the bytes of images instead of references.
    """

    @property
    def image_columns(self) -> Sequence[str]:
        """The columns that hold images, each a list of them or one."""
        ...
