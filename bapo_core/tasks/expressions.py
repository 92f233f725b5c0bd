"""Arithmetic expressions over + - * / ( ) and integers: read, evaluated exactly, made at random.

Text is parsed with an explicit stack and never evaluated by Python, so no input can run code,
exhaust the stack or take more than time linear in its (bounded) length.

Grammar: non-negative integers in ASCII digits without leading zeros, the four binary operators
with the usual precedence, parentheses, and blanks between tokens. There is no unary sign, no `**`
and no `//`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 512
"""Characters of an expression; longer ones are not read."""

_TOKEN = re.compile(r"[ \t\r\n]*(0|[1-9][0-9]*|[-+*/()])")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_LOWEST, _ATOM = 1, 3
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


class ExpressionError(ValueError):
    """The text is not an expression; the message says where it stops being one."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression, in postfix order."""

    postfix: tuple[int | str, ...]

    @property
    def numbers(self) -> list[int]:
        """The integers used, in order, with repetitions."""
        return [item for item in self.postfix if isinstance(item, int)]

    def value(self) -> Fraction:
        """The exact value. Raises `ZeroDivisionError` if there is none."""
        stack: list[Fraction] = []
        for item in self.postfix:
            if isinstance(item, int):
                stack.append(Fraction(item))
            else:
                right, left = stack.pop(), stack.pop()
                stack.append(_APPLY[item](left, right))
        return stack.pop()


def parse(text: str) -> Expression:
    """Reads `text`. Raises `ExpressionError` if it is too long or not in the grammar."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    output: list[int | str] = []
    pending: list[str] = []  # operators and open parentheses (Dijkstra's shunting yard)
    operand_next = True
    for position, token in _tokens(text):
        if (token == "(" or token.isdigit()) != operand_next:
            raise ExpressionError(f"unexpected {token!r} at character {position + 1}")
        if token.isdigit():
            output.append(int(token))
            operand_next = False
        elif token == "(":
            pending.append(token)
        elif token == ")":
            _unwind(pending, output, down_to=_LOWEST)
            if not pending:
                raise ExpressionError(f"unmatched ')' at character {position + 1}")
            pending.pop()
        else:
            _unwind(pending, output, down_to=_PRECEDENCE[token])
            pending.append(token)
            operand_next = True
    if operand_next:
        raise ExpressionError("ends where a number is expected")
    _unwind(pending, output, down_to=_LOWEST)
    if pending:
        raise ExpressionError("unmatched '('")
    return Expression(tuple(output))


def _unwind(pending: list[str], output: list[int | str], *, down_to: int) -> None:
    """Moves operators that bind at least so tightly to the output, up to an open parenthesis."""
    while pending and pending[-1] != "(" and _PRECEDENCE[pending[-1]] >= down_to:
        output.append(pending.pop())


def _tokens(text: str) -> list[tuple[int, str]]:
    found, position, end = [], 0, len(text.rstrip(" \t\r\n"))
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position]!r} at character {position + 1}")
        found.append((match.start(1), match.group(1)))
        position = match.end()
    return found


# ---- random expressions -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    precedence: int
    value: Fraction


def random_expression(
    numbers: Sequence[int], rng: random.Random, *, positive_integer: bool = False
) -> tuple[str, Fraction]:
    """(text, value) of a random expression that uses each of `numbers` (positive) exactly once.

    Parentheses stand only where the value needs them. With `positive_integer`, expressions are
    drawn until the value is a positive integer (the plain sum is one, so one always comes).
    """
    while True:
        parts = [_Part(str(number), _ATOM, Fraction(number)) for number in numbers]
        while len(parts) > 1:
            left = parts.pop(rng.randrange(len(parts)))
            right = parts.pop(rng.randrange(len(parts)))
            operators = "+-*/" if right.value else "+-*"
            parts.append(_combine(left, rng.choice(operators), right))
        value = parts[0].value
        if not positive_integer or (value > 0 and value.denominator == 1):
            return parts[0].text, value


def _combine(left: _Part, operator: str, right: _Part) -> _Part:
    precedence = _PRECEDENCE[operator]
    before = f"({left.text})" if left.precedence < precedence else left.text
    # a-(b-c) and a/(b/c) need theirs; a+(b-c) and a*(b/c) have the same value without.
    binds = right.precedence < precedence or (right.precedence == precedence and operator in "-/")
    after = f"({right.text})" if binds else right.text
    value = _APPLY[operator](left.value, right.value)
    return _Part(f"{before}{operator}{after}", precedence, value)
