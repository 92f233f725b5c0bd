"""Arithmetic expressions over + - * / ( ) and integers: parsing, exact evaluation, random draws.

Text is parsed with an explicit stack and never evaluated by Python, so no input can run code,
exhaust the stack or take more than linear time in its (bounded) length.

Grammar: non-negative integers in ASCII digits without leading zeros, the four binary operators
with the usual precedence, unary minus wherever an operand may begin, parentheses, and white space
between tokens. There is no unary plus, no `**` and no `//`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 512
"""Most characters of an expression; a longer text is not parsed."""

_TOKEN = re.compile(r"[ \t\r\n]*(0|[1-9][0-9]*|[-+*/()])")
_NEGATE = "negate"
"""Unary minus, which is no token of its own."""
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, _NEGATE: 3}
_LOWEST, _ATOM = 1, 3
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


class ExpressionError(ValueError):
    """A text that is not an expression; the message names the first character that is wrong."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression, in postfix notation."""

    postfix: tuple[int | str, ...]

    @property
    def numbers(self) -> list[int]:
        """The integers of the expression in order, with repetitions."""
        return [item for item in self.postfix if isinstance(item, int)]

    def value(self) -> Fraction:
        """Returns the exact value. Raises `ZeroDivisionError` if there is none."""
        stack: list[Fraction] = []
        for item in self.postfix:
            if isinstance(item, int):
                stack.append(Fraction(item))
            elif item == _NEGATE:
                stack.append(-stack.pop())
            else:
                right, left = stack.pop(), stack.pop()
                stack.append(_APPLY[item](left, right))
        return stack.pop()


def parse(text: str) -> Expression:
    """Parses `text`. Raises `ExpressionError` if it is too long or not in the grammar."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    output: list[int | str] = []
    pending: list[str] = []  # operators and open parentheses (Dijkstra's shunting yard)
    operand_next = True
    for position, token in _mark_negations(_tokens(text)):
        opens = token in ("(", _NEGATE)
        if (opens or token.isdigit()) != operand_next:
            raise ExpressionError(f"unexpected {token!r} at character {position + 1}")
        if token.isdigit():
            output.append(int(token))
            operand_next = False
        elif opens:
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
    """Moves operators of at least the precedence `down_to` to the output, up to a parenthesis."""
    while pending and pending[-1] != "(" and _PRECEDENCE[pending[-1]] >= down_to:
        output.append(pending.pop())


def _mark_negations(tokens: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Returns the tokens with `_NEGATE` for each "-" that stands where an operand may begin."""
    before = ["(", *(token for _, token in tokens)]
    return [
        (position, _NEGATE if token == "-" and previous in "(+-*/" else token)
        for (position, token), previous in zip(tokens, before, strict=False)
    ]


def _tokens(text: str) -> list[tuple[int, str]]:
    tokens, position, end = [], 0, len(text.rstrip(" \t\r\n"))
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position]!r} at character {position + 1}")
        tokens.append((match.start(1), match.group(1)))
        position = match.end()
    return tokens


# ---- random expressions -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Operand:
    text: str
    precedence: int
    value: Fraction


def random_expression(
    numbers: Sequence[int], rng: random.Random, *, positive_integer: bool = False
) -> tuple[str, Fraction]:
    """Draws an expression that uses each of `numbers` (positive) exactly once: (text, value).

    It has only the parentheses that its value needs. With `positive_integer`, expressions are drawn
    until the value is a positive integer; the sum of the numbers is one, so the draws end.
    """
    while True:
        operands = [_Operand(str(number), _ATOM, Fraction(number)) for number in numbers]
        while len(operands) > 1:
            left = operands.pop(rng.randrange(len(operands)))
            right = operands.pop(rng.randrange(len(operands)))
            operators = "+-*/" if right.value else "+-*"
            operands.append(_combine(left, rng.choice(operators), right))
        value = operands[0].value
        if not positive_integer or (value > 0 and value.denominator == 1):
            return operands[0].text, value


def _combine(left: _Operand, operator: str, right: _Operand) -> _Operand:
    precedence = _PRECEDENCE[operator]
    left_text = f"({left.text})" if left.precedence < precedence else left.text
    # a-(b-c) and a/(b/c) need parentheses; a+(b-c) and a*(b/c) have the same value without.
    loose = right.precedence < precedence or (right.precedence == precedence and operator in "-/")
    right_text = f"({right.text})" if loose else right.text
    value = _APPLY[operator](left.value, right.value)
    return _Operand(f"{left_text}{operator}{right_text}", precedence, value)


# ---- search -------------------------------------------------------------------------------------


def find_expression(numbers: Sequence[int], target: int) -> str | None:
    """Returns an expression over all `numbers` (positive) that equals `target`, or None.

    It has only the parentheses that its value needs. Of several, it is always the same one.
    """
    return _find([_Operand(str(number), _ATOM, Fraction(number)) for number in numbers], target)


def _find(operands: list[_Operand], target: int) -> str | None:
    """Replaces any two operands by one, in every way, until one is left."""
    if len(operands) == 1:
        return operands[0].text if operands[0].value == target else None
    for i, left in enumerate(operands):
        for j, right in enumerate(operands):
            if i == j:
                continue
            rest = [operand for k, operand in enumerate(operands) if k not in (i, j)]
            # The operands of a sum or a product are taken in one order.
            for operator in "+-*/" if i < j else "-/":
                if operator == "/" and not right.value:
                    continue
                if not rest and _APPLY[operator](left.value, right.value) != target:
                    continue  # the text of a wrong result is not needed
                text = _find([*rest, _combine(left, operator, right)], target)
                if text is not None:
                    return text
    return None
