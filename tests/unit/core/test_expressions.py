"""The parser reads expressions as Python does, evaluates them exactly, and refuses other text."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.tasks.expressions import ExpressionError, parse, random_expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", Fraction(7)),
        ("1+2*3", Fraction(7)),
        ("(1+2)*3", Fraction(9)),
        ("8-3-2", Fraction(3)),
        ("8-(3-2)", Fraction(7)),
        ("8/4/2", Fraction(1)),
        ("8/(4/2)", Fraction(4)),
        ("1/3", Fraction(1, 3)),
        ("2*3/4*5", Fraction(15, 2)),
        (" ( 10 - 4 )\t/\n3 ", Fraction(2)),
        ("((((5))))", Fraction(5)),
        ("0-0", Fraction(0)),
        ("-3+45", Fraction(42)),
        ("-(3-45)", Fraction(42)),
        ("6*-7", Fraction(-42)),
        ("-8/-(4/2)", Fraction(4)),
        ("1--1", Fraction(2)),
        ("- - 5 - -2", Fraction(7)),
    ],
)
def test_values_are_exact_with_the_usual_precedence(text: str, value: Fraction) -> None:
    assert parse(text).value() == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "()", "(", ")", ")(", "(1", "1)", "1+", "+1", "-", "1-", "1-+1", "(-)",
        "1 2", "1(2)",
        "(1)(2)", "2**3", "7//2", "1.5", "1e3", "0x1", "007", "1_000", "1,2", "1=1", "1+a", "1%2",
        "2^3", "~1", "1\x00", "1+\x002", "\ud800", "\u0661+1", "\u00b2", "1\u22122",
        "2\u00d73", "1\u00a0+1",
        "__import__('os').system('true')", "[1]", "1 if 1 else 2", "9" * 513, "(" * 256 + "1",
    ],
)  # fmt: skip
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


def test_an_error_names_the_character_and_its_position() -> None:
    with pytest.raises(ExpressionError, match=r"unexpected '\*' at character 4"):
        parse("1 **2")


def test_depth_is_limited_by_length_alone() -> None:
    assert parse("(" * 255 + "1" + ")" * 255).value() == 1
    assert parse("1-(" * 100 + "1" + ")" * 100).value() == 1
    assert parse("-" * 511 + "1").value() == -1


def test_division_by_zero_has_no_value() -> None:
    with pytest.raises(ZeroDivisionError):
        parse("1/(2-2)").value()


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
def test_a_parsed_expression_has_the_value_that_python_gives_it(text: str) -> None:
    """The grammar is a subset of Python's, without unary plus, ** and //."""
    try:
        expression = parse(text)
    except ExpressionError:
        return
    exact = "".join(f"Fraction({t})" if t.isdigit() else t for t in split_tokens(text))
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            expression.value()
    else:
        assert expression.value() == expected


def split_tokens(text: str) -> list[str]:
    for symbol in "+-*/()":
        text = text.replace(symbol, f" {symbol} ")
    return text.split()


numbers = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@given(numbers, st.integers(0, 2**32))
def test_a_random_expression_has_the_stated_numbers_and_value(
    given_numbers: list[int], seed: int
) -> None:
    text, value = random_expression(given_numbers, random.Random(seed))
    expression = parse(text)
    assert sorted(expression.numbers) == sorted(given_numbers)
    assert expression.value() == value


@given(numbers, st.integers(0, 2**32))
def test_a_random_expression_has_no_redundant_parentheses(
    given_numbers: list[int], seed: int
) -> None:
    text, value = random_expression(given_numbers, random.Random(seed))
    for opened in (i for i, c in enumerate(text) if c == "("):
        depth, closed = 1, opened
        while depth:
            closed += 1
            depth += {"(": 1, ")": -1}.get(text[closed], 0)
        without = parse(text[:opened] + text[opened + 1 : closed] + text[closed + 1 :])
        # By chance the value may stay (8-(3-3)); the structure never does.
        assert without.postfix != parse(text).postfix
    assert parse(text).value() == value


@given(numbers.filter(lambda n: len(n) <= 4), st.integers(0, 2**32))
def test_a_random_expression_has_a_positive_integer_value_on_request(
    given_numbers: list[int], seed: int
) -> None:
    text, value = random_expression(given_numbers, random.Random(seed), positive_integer=True)
    assert value > 0
    assert value.denominator == 1
    assert parse(text).value() == value


def test_random_expressions_use_all_operators_and_parentheses() -> None:
    rng = random.Random(0)
    texts = "".join(random_expression([2, 3, 4, 5], rng)[0] for _ in range(200))
    assert set(texts) == set("2345+-*/()")
