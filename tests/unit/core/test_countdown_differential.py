"""The Countdown verifier agrees with an independent one, which uses Python's parser."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from fractions import Fraction

from bapo_core.tasks.countdown import CountdownTask, random_expression

TASK = CountdownTask(template="short")
JUNK = [*"%^ \t()+-*/01.,x_e\n=#٣²\x00", "**", "//", "  ", "()", "((", "+-", "1e1", "0x1"]
ALLOWED = re.compile(r"[0-9+\-*/() \t\r\n]*")
LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")


def verify_independently(numbers: Sequence[int], target: int, answer: str) -> bool:
    """Returns whether `answer` is right, by ast for the grammar and Fraction for the value."""
    answer = answer.strip()
    if not answer or len(answer) > 512 or not ALLOWED.fullmatch(answer):
        return False
    if LEADING_ZERO.search(answer):
        return False
    try:
        # A line break ends an expression in Python and is a blank in an answer.
        tree = ast.parse(re.sub(r"\s", " ", answer), mode="eval").body
        used: list[int] = []
        value = evaluate(tree, used)
    except (SyntaxError, ZeroDivisionError, NotImplementedError):
        return False
    return sorted(used) == sorted(numbers) and value == target


def evaluate(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, used)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = evaluate(left, used), evaluate(right, used)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
    raise NotImplementedError(type(node).__name__)


def draw_problem(rng: random.Random) -> tuple[list[int], int, str]:
    """Draws (numbers, target, answer), where the answer is right, nearly right or mutilated."""
    numbers = [rng.randint(1, rng.choice([9, 99])) for _ in range(rng.choice([2, 3, 4, 5, 6]))]
    text, value = random_expression(numbers, rng, positive_integer=True)
    target = int(value)
    kind = rng.randrange(4)
    if kind == 0:
        return numbers, target, add_blanks(text, rng)
    if kind == 1:  # another expression over the same numbers, mostly of another value
        return numbers, target, random_expression(numbers, rng)[0]
    if kind == 2:  # the problem has another number in place of one of the expression
        return [*numbers[1:], rng.randint(1, 99)], target, add_blanks(text, rng)
    for _ in range(rng.randint(1, 3)):
        text = mutate(text, rng)
    return numbers, target, text


def add_blanks(text: str, rng: random.Random) -> str:
    """Returns an equal expression with blanks between tokens and parentheses around it."""
    tokens = re.findall(r"\d+|.", text)
    blanks = ["", "", " ", "\t", "\n", "  "]
    inside = "".join(token + rng.choice(blanks) for token in tokens)
    return rng.choice([inside, f"({inside})", f" (({inside}) ) "])


def mutate(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    match rng.randrange(3):
        case 0:
            return text[:at] + rng.choice(JUNK) + text[at:]
        case 1:
            return text[:at] + text[at + 1 :]
        case _:
            return text[:at] + rng.choice(JUNK) + text[at + 1 :]


def compare(seed: int, count: int) -> None:
    rng = random.Random(seed)
    right = 0
    for _ in range(count):
        numbers, target, answer = draw_problem(rng)
        expected = verify_independently(numbers, target, answer)
        verdict = TASK.verify({"nums": numbers, "target": target}, answer)
        assert (verdict.reward == 1.0) == expected, (numbers, target, answer, verdict)
        right += expected
    # Two verifiers that accept everything, or nothing, would agree as well.
    assert 0.2 < right / count < 0.6


def test_two_verifiers_agree_on_a_hundred_thousand_answers() -> None:
    compare(0, 100_000)
