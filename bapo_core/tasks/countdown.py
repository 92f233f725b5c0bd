"""Countdown asks for an expression over given numbers, each used once, that equals a target.

Operators are + - * / and unary minus. A payload is {"nums": [positive integers], "target": positive
integer}, the columns of the public dataset Jiayi-Pan/Countdown-Tasks-3to4.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, ClassVar, Literal, get_args

from bapo_core.seeding import derive_rng
from bapo_core.tasks.base import (
    Message,
    Payload,
    Verdict,
    VerdictStatus,
    draw_distinct,
    with_format,
)
from bapo_core.tasks.expressions import (
    MAX_LENGTH,
    Expression,
    ExpressionError,
    find_expression,
    parse,
    random_expression,
)
from bapo_core.tasks.tags import THINK_PREFIX, last_answer

__all__ = ["CountdownTask", "is_solvable", "random_expression"]

Template = Literal["short", "think", "prefilled"]

MAX_NUMBERS = 6
"""Most numbers of a problem; with more, the search for a solution takes too long."""

_THINK = """Use the numbers {numbers} to make an expression that equals {target}. \
You may use +, -, *, / and parentheses, and must use each number exactly once.
Reason inside <think> </think> tags first. Then give only the expression inside \
<answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."""


@dataclass(frozen=True, slots=True)
class CountdownTask:
    """Countdown with a prompt template and a distribution of generated problems."""

    name: ClassVar[str] = "countdown"
    columns: ClassVar[Sequence[str]] = ("nums", "target")
    reward_parts: ClassVar[Sequence[str]] = ("format",)

    template: Template = "think"
    """Prompt template. `short`: the message is "3 4 7=84:" and the response is the expression
    alone, for a tiny character-level model. `think`: instructions for a chat model, whose answer is
    in the last <answer> tag. `prefilled`: the same, and the response continues a message of the
    assistant that opens <think>, as in MoPPS."""
    numbers: Sequence[int] = (3, 4)
    """Possible counts of numbers in a generated problem, all equally likely."""
    max_number: int = 99
    """Largest number of a generated problem; the smallest is 1."""
    min_target: int = 10
    """Smallest target of a generated problem."""
    max_target: int = 99
    """Largest target of a generated problem."""

    def __post_init__(self) -> None:
        if self.template not in get_args(Template):
            raise ValueError(
                f"template is {self.template!r}; choose {', '.join(get_args(Template))}"
            )
        if not self.numbers or not all(2 <= n <= MAX_NUMBERS for n in self.numbers):
            raise ValueError(f"numbers is {self.numbers}; list sizes between 2 and {MAX_NUMBERS}")
        if self.max_number < 1 or not 1 <= self.min_target <= self.max_target:
            raise ValueError(
                f"max_number={self.max_number}, min_target={self.min_target}, "
                f"max_target={self.max_target}: need max_number >= 1 and "
                "1 <= min_target <= max_target"
            )

    def uid(self, payload: Payload) -> str:
        """Returns, for example, "countdown:3-4-7:84", whatever the order of the numbers."""
        return _uid(payload["nums"], payload["target"])

    def render(self, payload: Payload) -> list[Message]:
        """Returns one user message, and with `prefilled` the beginning of the assistant's."""
        numbers, target = payload["nums"], payload["target"]
        if self.template == "short":
            content = f"{' '.join(map(str, numbers))}={target}:"
        else:
            content = _THINK.format(numbers=", ".join(map(str, numbers)), target=target)
        messages = [{"role": "user", "content": content}]
        if self.template == "prefilled":
            messages.append({"role": "assistant", "content": THINK_PREFIX})
        return messages

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Rewards an answer that uses exactly the given numbers and equals the target exactly."""
        return with_format(self._judge_response(payload, response))

    def _judge_response(self, payload: Payload, response: str) -> Verdict:
        answer = response if self.template == "short" else last_answer(response)
        if answer is None or not (answer := answer.strip()):
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        if len(answer) > MAX_LENGTH:
            detail = f"the answer is longer than {MAX_LENGTH} characters"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        try:
            expression = parse(answer)
        except ExpressionError as error:
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, str(error))
        status, detail = _judge(expression, payload["nums"], payload["target"])
        return Verdict(1.0 if status is VerdictStatus.OK else 0.0, status, answer, detail)

    def demonstrate(self, payload: Payload) -> str | None:
        """Returns a response with an expression that solves the problem, found by search.

        The search takes half a millisecond for 3 to 4 numbers.
        """
        expression = find_expression(payload["nums"], payload["target"])
        if expression is None or self.template == "short":
            return expression
        thought = f"{expression} uses each number once and equals {payload['target']}."
        opening = "" if self.template == "prefilled" else "<think>"
        return f"{opening}{thought}</think>\n<answer>{expression}</answer>"

    def parse_row(self, row: Mapping[str, Any]) -> Payload:
        """Returns the problem of a row.

        Checking that a problem of 4 numbers has a solution takes a fraction of a millisecond.
        Raises `ValueError` for anything but 2 to 6 positive integers, a positive integer target,
        and a solvable problem.
        """
        numbers, target = row["nums"], row["target"]
        if not (
            isinstance(numbers, list)
            and 2 <= len(numbers) <= MAX_NUMBERS
            and all(map(_is_positive_integer, numbers))
        ):
            raise ValueError(
                f"nums is {numbers!r:.80}; make it a list of 2 to {MAX_NUMBERS} positive integers"
            )
        if not _is_positive_integer(target):
            raise ValueError(f"target is {target!r:.80}; make it a positive integer")
        if not is_solvable(numbers, target):
            raise ValueError(
                f"no expression over {numbers} equals {target}; correct or remove the row"
            )
        return {"nums": numbers, "target": target}

    def generate(self, seed: int, n: int) -> list[Payload]:
        """Returns n distinct solvable problems. Raises `ValueError` if there are not as many."""
        return self._draw(derive_rng(seed, "countdown", "train"), n, set())

    def generate_split(
        self, seed: int, *, train: int, test: int
    ) -> tuple[list[Payload], list[Payload]]:
        """Returns disjoint (train, test) problems; the test problems do not depend on `train`."""
        seen: set[str] = set()
        held_out = self._draw(derive_rng(seed, "countdown", "test"), test, seen)
        return self._draw(derive_rng(seed, "countdown", "train"), train, seen), held_out

    def _draw(self, rng: random.Random, n: int, seen: set[str]) -> list[Payload]:
        """Draws n problems whose uids are not in `seen`, and adds their uids to it."""
        options = (
            f"numbers={list(self.numbers)}, max_number={self.max_number}, targets "
            f"{self.min_target}..{self.max_target}; widen these options"
        )

        def draw() -> tuple[str, Payload] | None:
            problem = self._random_problem(rng)
            return None if problem is None else (self.uid(problem), problem)

        return draw_distinct(draw, n, seen, options)

    def _random_problem(self, rng: random.Random) -> Payload | None:
        """Draws a problem whose target is the value of a random expression, so it is solvable.

        Returns None if that value is not a valid target.
        """
        numbers = [rng.randint(1, self.max_number) for _ in range(rng.choice(self.numbers))]
        _, value = random_expression(numbers, rng)
        if value.denominator != 1 or not self.min_target <= value <= self.max_target:
            return None
        return {"nums": numbers, "target": int(value)}


def _uid(numbers: Sequence[int], target: int) -> str:
    return f"countdown:{'-'.join(map(str, sorted(numbers)))}:{target}"


def _judge(
    expression: Expression, numbers: Sequence[int], target: int
) -> tuple[VerdictStatus, str]:
    # Checked before evaluation, because an expression over other numbers may have a huge value.
    if sorted(expression.numbers) != sorted(numbers):
        detail = f"uses {sorted(expression.numbers)}, given {sorted(numbers)}"
        return VerdictStatus.WRONG_NUMBERS, detail
    try:
        value = expression.value()
    except ZeroDivisionError:
        return VerdictStatus.DIVISION_BY_ZERO, "divides by zero"
    if value != target:
        return VerdictStatus.WRONG_VALUE, f"equals {value}, not {target}"
    return VerdictStatus.OK, ""


# ---- solving ------------------------------------------------------------------------------------


def is_solvable(numbers: Sequence[int], target: int) -> bool:
    """Whether an expression over all `numbers` (positive, at most 6) equals `target` (positive)."""
    return _reaches(tuple(sorted(numbers)), target, 1)


def _reaches(numbers: tuple[int, ...], top: int, bottom: int) -> bool:
    """Whether `numbers` make top / bottom (bottom > 0).

    It meets in the middle: each value of the smaller operand of the last operation determines the
    value that the larger operand must have. Pairs of integers are used because Fractions are too
    slow for files of tens of thousands of rows.
    """
    if len(numbers) == 1:
        return numbers[0] * bottom == top
    if len(numbers) == 2:
        a, b = numbers
        return (
            (a + b) * bottom == top
            or (a - b) * bottom == top
            or (b - a) * bottom == top
            or a * b * bottom == top
            or a * bottom == b * top
            or b * bottom == a * top
        )
    return any(
        _completes(large, p, q, top, bottom)
        for small, large in _splits(numbers)
        for p, q in _values(small)
    )


def _completes(large: tuple[int, ...], p: int, q: int, top: int, bottom: int) -> bool:
    """Whether `large` makes an x with p/q (op) x = top/bottom, or x (op) p/q = top/bottom."""
    if p == 0 and top == 0:
        return True  # 0 * x, and every set of numbers makes some x
    a, b, denominator = top * q, p * bottom, bottom * q
    if (
        _reaches(large, a - b, denominator)  # p/q + x
        or _reaches(large, b - a, denominator)  # p/q - x
        or _reaches(large, a + b, denominator)  # x - p/q
    ):
        return True
    if p == 0:
        return False
    if _reaches(large, top * p, denominator):  # x / (p/q)
        return True
    if top == 0:
        return _reaches(large, 0, 1)  # p/q * x
    return _signed_reaches(large, a, b) or _signed_reaches(large, b, a)  # p/q * x, (p/q) / x


def _signed_reaches(numbers: tuple[int, ...], top: int, bottom: int) -> bool:
    return _reaches(numbers, top, bottom) if bottom > 0 else _reaches(numbers, -top, -bottom)


@lru_cache(maxsize=65_536)
def _values(numbers: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """Returns all values of at most 3 `numbers`, as unreduced pairs (top, bottom > 0)."""
    if len(numbers) == 1:
        return frozenset([(numbers[0], 1)])
    values = set()
    for small, large in _splits(numbers):
        for a, b in _values(small):
            for c, d in _values(large):
                values |= {(a * d + c * b, b * d), (a * d - c * b, b * d), (c * b - a * d, b * d)}
                values.add((a * c, b * d))
                if c:
                    values.add((a * d, b * c) if c > 0 else (-a * d, -b * c))
                if a:
                    values.add((b * c, a * d) if a > 0 else (-b * c, -a * d))
    return frozenset(values)


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields all divisions of sorted `numbers` into a smaller and a larger part, both sorted."""
    indexes = range(len(numbers))
    for size in range(1, len(numbers) // 2 + 1):
        for small in combinations(indexes, size):
            yield (
                tuple(numbers[i] for i in small),
                tuple(numbers[i] for i in indexes if i not in small),
            )


def _is_positive_integer(value: Any) -> bool:
    # bool is a subclass of int, but JSON's true is not a number.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
