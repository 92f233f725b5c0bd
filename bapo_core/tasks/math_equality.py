r"""Decides whether an answer, read as a structure, equals a reference answer.

Structures are equal part by part. Constants are equal by value: exactly if both are rational, else
to 40 digits. Expressions are equal if their values agree at random points, whatever SymPy makes of
their difference; where too few points have a value, SymPy decides. What has no value (0/0, 1/0)
equals nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]
import sympy
from sympy import Integer, Symbol

from bapo_core.tasks.math_answers import (
    Answer,
    Grid,
    Items,
    Joined,
    Relation,
    Value,
    Words,
)
from bapo_core.tasks.math_reader import function_values
from bapo_core.tasks.units import may_be_equal

DIGITS = 60
"""Decimal digits of the arithmetic."""
TOLERANCE = mpmath.mpf(10) ** -40
"""Largest relative difference of equal values."""
PLACES = 6
"""Decimal places to which a decimal may stand for a value that no decimal has. For a value below 1,
they are significant digits."""
_EXACT_PLACES = 12
POINTS = 6
"""Points at which two expressions with symbols are compared."""
_TRIES = 36
_TRIES_IN_PIECES = 96
"""Points for |x|, a floor, a root, ..., whose pieces may agree in one place and differ in another.
"""
_MAX_EVALUATIONS = 20_000
"""Parts of expressions in pieces that are evaluated, at all points together; at `_TRIES` points,
there may be more."""
_NEAR = (Fraction(10),)
_SCALES = (*(Fraction(10) ** n for n in range(-2, 5)), Fraction(10), Fraction(10))
"""Magnitudes of coordinates, besides the numbers in the expressions."""
_LARGEST_SCALE = 10**30
_LARGEST_SCALE_OF_POWERS = 100
_FAR_DIGITS = 260
"""Decimal digits away from 1, where large terms cancel."""
_MAX_OPS = 60
"""Operations of two expressions that SymPy may be asked to simplify."""
_LARGEST_EXPONENT = 10**7
_LARGEST_TERM = 10**100
_DIGITS_OF_ANGLE = 45
"""Decimal digits that an angle needs after its point: some more than the tolerance has."""
_CONTEXT = mpmath.mp.clone() if hasattr(mpmath.mp, "clone") else mpmath.MPContext()
_CONTEXT.dps = DIGITS


class NoValue(ArithmeticError):
    """Raised for an expression that has no finite value."""


def equals(gold: Answer, answer: Answer, ordered: bool = False) -> bool:
    """Returns whether an answer equals the reference answer `gold`.

    ordered: whether the order of a list without brackets matters.
    """
    return _is_choice(gold, answer) or _equal(gold, answer, ordered)


def _is_choice(gold: Answer, answer: Answer) -> bool:
    """Returns whether an answer is a reference such as (A), the name of a choice, written small."""
    if not isinstance(gold, Value) or not isinstance(answer, Value):
        return False
    one, other = gold.expression, answer.expression
    if other is sympy.E:
        other = Symbol("e")  # It is read as Euler's number.
    if not one.is_Symbol or not other.is_Symbol or answer.unit:
        return False
    return one.name in _CHOICES and other.name == one.name.lower()


def _equal(gold: Answer, answer: Answer, ordered: bool = False) -> bool:
    if isinstance(answer, Relation) and _contradicts(answer):
        return False
    compare = _COMPARISONS.get(type(gold)) if type(gold) is type(answer) else None
    if compare is not None:
        return compare(gold, answer, ordered)
    if isinstance(answer, Relation) and set(answer.operators) == {"="}:
        return _equal(gold, answer.sides[-1], ordered)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return gold == answer
    regions = _region(gold), _region(answer)
    if regions[0] is not None and regions[1] is not None:
        return _equal_regions(regions[0], regions[1])
    inner_gold, inner_answer = _unwrapped(gold), _unwrapped(answer)
    if inner_gold is gold and (inner_answer is answer or isinstance(answer, Relation)):
        return False
    return _equal(inner_gold, inner_answer, ordered)


def _unwrapped(answer: Answer) -> Answer:
    """Returns the element of a set of one, and the right side of x = 5; else the answer."""
    if isinstance(answer, Items) and answer.opening == r"\{" and len(answer.items) == 1:
        return answer.items[0]
    if isinstance(answer, Relation) and answer.operators == ("=",) and _is_name(answer.sides[0]):
        return answer.sides[1]
    return answer


# ---- structures ---------------------------------------------------------------------------------


def _equal_items(gold: Items, answer: Items, ordered: bool) -> bool:
    brackets = (gold.opening, gold.closing), (answer.opening, answer.closing)
    listed = ("", "")
    if brackets[0] == brackets[1]:
        in_order = (brackets[0] == listed and ordered) or brackets[0][0] not in ("", r"\{")
    elif set(brackets) == {listed, (r"\{", r"\}")}:
        in_order = ordered and brackets[0] == listed
    elif set(brackets) == {listed, ("(", ")")}:
        in_order = True
    else:
        return False
    if gold.ambiguous or answer.ambiguous:
        if gold.ambiguous and answer.ambiguous:
            return False  # The two have been compared as numbers.
        in_order = True
    if in_order:
        return len(gold.items) == len(answer.items) and all(
            _equal_elements(one, other, ordered)
            for one, other in zip(gold.items, answer.items, strict=True)
        )
    regions = _region(gold), _region(answer)
    if regions[0] is not None and regions[1] is not None and _has_relation(gold, answer):
        return _equal_regions(regions[0], regions[1])
    return _same_members(gold.items, answer.items, ordered)


def _has_relation(*answers: Items) -> bool:
    return any(isinstance(item, Relation) for answer in answers for item in answer.items)


def _same_members(gold: Sequence[Answer], answer: Sequence[Answer], ordered: bool = False) -> bool:
    """Returns whether the elements are equal in some order; an answer may repeat an element."""
    left = list(answer)
    for element in gold:
        match = next(
            (n for n, other in enumerate(left) if _equal_elements(element, other, ordered)), None
        )
        if match is None:
            return False
        left.pop(match)
    if not left:
        return True
    repeated = any(_equal(one, other) for n, one in enumerate(gold) for other in gold[:n])
    return not repeated and all(
        any(_equal_elements(element, other, ordered) for element in gold) for other in left
    )


def _equal_elements(gold: Answer, answer: Answer, ordered: bool) -> bool:
    """Returns whether two elements of a list are equal; there, x = 2 does not equal y = 2."""
    if (
        isinstance(gold, Relation)
        and isinstance(answer, Relation)
        and _is_name(gold.sides[0])
        and _is_name(answer.sides[0])
        and gold.names[0] != answer.names[0]
    ):
        return False
    return _equal(gold, answer, ordered)


def _equal_grids(gold: Grid, answer: Grid, ordered: bool) -> bool:
    shapes = [[len(row) for row in grid.rows] for grid in (gold, answer)]
    return (
        gold.kind == answer.kind
        and shapes[0] == shapes[1]
        and all(
            _equal(one, other, ordered)
            for rows in zip(gold.rows, answer.rows, strict=True)
            for one, other in zip(*rows, strict=True)
        )
    )


def _equal_joined(gold: Joined, answer: Joined, ordered: bool) -> bool:
    if gold.operator != answer.operator or len(gold.items) != len(answer.items):
        return False
    if gold.operator in (r"\cup", r"\cap"):
        return _same_members(gold.items, answer.items, ordered)
    return all(
        _equal(one, other, ordered) for one, other in zip(gold.items, answer.items, strict=True)
    )


# ---- relations and intervals --------------------------------------------------------------------

_MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_CALL = re.compile(r"([A-Za-z])'*\(([a-z](?:,[a-z])*)\)")
"""A function of variables, such as f(x)."""
_CHOICES = frozenset(("A", "B", "C", "D", "E"))
_REALS = Symbol(r"\mathbb{R}")
Interval = tuple[Value, Value, bool, bool]
"""(lower end, upper end, whether it contains the lower end, the upper end)."""


def _is_name(answer: Answer) -> bool:
    """Returns whether an answer is a name alone: x, or f(x) and f(x, y)."""
    if isinstance(answer, Words):
        return answer.text.isalpha()
    if not isinstance(answer, Value):
        return False
    expression = answer.expression
    factors = expression.args if expression.is_Mul else (expression,)
    return len(factors) <= 2 and all(factor.is_Symbol for factor in factors)


def _contradicts(relation: Relation) -> bool:
    """Returns whether a chain equates two numbers that differ, as 7 = 42 and 7 = x = 42 do."""
    if set(relation.operators) != {"="}:
        return False
    numbers = [
        side
        for side in relation.sides
        if isinstance(side, Value) and not side.expression.free_symbols
    ]
    return any(not _equal_values(numbers[0], other) for other in numbers[1:])


def _equal_relations(gold: Relation, answer: Relation, ordered: bool) -> bool:
    equations = [set(relation.operators) == {"="} for relation in (gold, answer)]
    if all(equations):
        return _equal_equations(gold, answer, ordered)
    if any(equations):
        return False
    if gold.operators == answer.operators and all(map(_equal, gold.sides, answer.sides)):
        return True
    mirrored = _mirror(answer)
    if gold.operators == mirrored.operators and all(map(_equal, gold.sides, mirrored.sides)):
        return True
    regions = _region(gold), _region(answer)
    if regions[0] is None or regions[1] is None or _variable(gold) != _variable(answer):
        return False
    return _equal_regions(regions[0], regions[1])


def _mirror(relation: Relation) -> Relation:
    """Returns a relation read from right to left."""
    return Relation(
        tuple(_MIRRORED.get(operator, operator) for operator in reversed(relation.operators)),
        tuple(reversed(relation.sides)),
        tuple(reversed(relation.names)),
    )


def _equal_equations(gold: Relation, answer: Relation, ordered: bool) -> bool:
    if len(gold.sides) != 2:
        return _equal(gold.sides[-1], answer.sides[-1], ordered)
    left, right = gold.sides
    if len(answer.sides) != 2:
        return _is_name(left) and _equal(right, answer.sides[-1], ordered)
    for first, second in (answer.sides, tuple(reversed(answer.sides))):
        if _equal(left, first, ordered) and _equal(right, second, ordered):
            return True
    if _is_name(left) and _is_name(answer.sides[0]) and gold.names[0] != answer.names[0]:
        # f(x) = 2x is accepted for y = 2x, and a = 5 for x = 5, but y = 2x not for x = 2x.
        calls = [_CALL.fullmatch(relation.names[0]) for relation in (gold, answer)]
        letter = calls[1][1] if calls[1] else answer.names[0]
        if calls[0] and calls[1] and calls[0][2] != calls[1][2] and _symbols(right):
            return False  # f(n) = n^2 is another function than f(x) = n^2.
        if Symbol(letter) not in _symbols(right) and (any(calls) or not _symbols(right)):
            return _equal(right, answer.sides[1], ordered)
    values = [*gold.sides, *answer.sides]
    if not all(isinstance(value, Value) for value in values):
        return False
    one, two, three, four = (value.expression for value in values)  # type: ignore[union-attr]
    return _proportional(one - two, three - four)


def _symbols(answer: Answer) -> set[Any]:
    if isinstance(answer, Words):  # SRMC in MR = SRMC is a name, too.
        return set(map(Symbol, filter(str.isalpha, answer.text)))
    return set(answer.expression.free_symbols) if isinstance(answer, Value) else set()


def _variable(relation: Relation) -> set[Any]:
    return set().union(*map(_symbols, relation.sides))


def _region(answer: Answer) -> list[Interval] | None:
    """Returns the intervals of an answer about one variable; None for another answer."""
    if isinstance(answer, Joined):
        return _regions(answer.items) if answer.operator == r"\cup" else None
    if isinstance(answer, Relation):
        return _region_of_inequality(answer)
    if isinstance(answer, Value) and answer.expression == _REALS:
        return [(Value(-sympy.oo), Value(sympy.oo), False, False)]
    if not isinstance(answer, Items):
        return None
    if not answer.opening:
        return _regions(answer.items)
    if answer.opening in ("(", "[") and len(answer.items) == 2:
        low, high = answer.items
        if isinstance(low, Value) and isinstance(high, Value):
            return [(low, high, answer.opening == "[", answer.closing == "]")]
    return None


def _region_of_inequality(relation: Relation) -> list[Interval] | None:
    """Returns the intervals of 0 < x < 1, of x > 3 and of x \\ne 3; None for another relation."""
    if relation.operators[0] in (">", r"\ge"):
        relation = _mirror(relation)
    sides = [side for side in relation.sides if isinstance(side, Value)]
    variables = [n for n, side in enumerate(sides) if side.expression.is_Symbol]
    if len(sides) < len(relation.sides) or len(sides) > 3 or len(variables) != 1:
        return None
    position, operators = variables[0], relation.operators
    low, high = Value(-sympy.oo), Value(sympy.oo)
    if operators == (r"\ne",):
        hole = sides[1 - position]
        return [(low, hole, False, False), (hole, high, False, False)]
    if not set(operators) <= {"<", r"\le"} or (len(sides) == 3 and position != 1):
        return None
    with_low = with_high = False
    if position > 0:
        low, with_low = sides[position - 1], operators[position - 1] == r"\le"
    if position < len(sides) - 1:
        high, with_high = sides[position + 1], operators[position] == r"\le"
    return [(low, high, with_low, with_high)]


def _regions(answers: Sequence[Answer]) -> list[Interval] | None:
    found: list[Interval] = []
    for answer in answers:
        intervals = _region(answer)
        if intervals is None:
            return None
        found.extend(intervals)
    return found


def _equal_regions(gold: Sequence[Interval], answer: Sequence[Interval]) -> bool:
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for low, high, with_low, with_high in gold:
        match = next(
            (
                other
                for other in left
                if other[2:] == (with_low, with_high)
                and _equal_values(low, other[0])
                and _equal_values(high, other[1])
            ),
            None,
        )
        if match is None:
            return False
        left.remove(match)
    return True


# ---- values -------------------------------------------------------------------------------------


def _equal_values(gold: Value, answer: Value, _: bool = False) -> bool:
    if gold.base or answer.base:
        return _equal_digits(gold, answer)
    if not may_be_equal(gold.quantity, answer.quantity):
        return False
    if None in (gold.quantity, answer.quantity):
        exponents = gold.unit_exponents, answer.unit_exponents
        if all(exponents) and exponents[0] != exponents[1]:
            return False
    for one, other in _pairs(gold, answer):
        if equal_expressions(one, other) or _rounds_to(gold, answer, one, other):
            return True
    return False


def _pairs(gold: Value, answer: Value) -> Iterator[tuple[Any, Any]]:
    """Yields the pairs of expressions, one of which must be equal."""
    first, second = gold.expression, answer.expression
    yield first, second
    if gold.loose is not None or answer.loose is not None:
        for one in (first, gold.loose):
            for other in (second, answer.loose):
                if one is not None and other is not None and (one, other) != (first, second):
                    yield one, other
    if answer.product is not None and not function_values(first):
        yield first, answer.product
    percent = [value.unit == "%" for value in (gold, answer)]
    if percent == [True, False]:
        yield first / 100, second
    elif percent == [False, True]:
        yield first, second / 100
    # `5 m` is a product unless the other has the unit m.
    for unit, product, number in (
        (gold.unit, second, first),
        (answer.unit, first, second),
    ):
        if len(unit) == 1 and unit.isalpha() and product.has(Symbol(unit)):
            yield (
                (number * Symbol(unit), product)
                if product is second
                else (
                    product,
                    number * Symbol(unit),
                )
            )


def _equal_digits(gold: Value, answer: Value) -> bool:
    bases = {gold.base, answer.base} - {""}
    texts = [
        value.expression.name if value.base else str(value.expression) for value in (gold, answer)
    ]
    return len(bases) < 2 and texts[0] == texts[1]


def _rounds_to(gold: Value, answer: Value, one: Any, other: Any) -> bool:
    """Returns whether one of two constants is a decimal numeral that rounds the other."""
    places = gold.decimal_places, answer.decimal_places
    if places == (None, None) or one.free_symbols or other.free_symbols:
        return False
    if None not in places:
        fewer, more = sorted(((places[0] or 0, one), (places[1] or 0, other)), key=lambda x: x[0])
        return (
            PLACES <= fewer[0] < more[0]
            and abs(fewer[1] - more[1]) <= sympy.Rational(1, 2) / Integer(10) ** fewer[0]
        )
    exact, decimal = (one, other) if places[0] is None else (other, one)
    if exact.is_Rational and Integer(10) ** _EXACT_PLACES % exact.q == 0:
        return False  # A decimal can be exact, so it must be.
    try:
        size, value = evaluate(exact, {}), evaluate(decimal, {})
    except NoValue:
        return False
    if _CONTEXT.im(size) or size == 0:
        return False
    magnitude = max(0, int(_CONTEXT.floor(-_CONTEXT.log10(abs(size)))))
    return bool(abs(size - value) <= _CONTEXT.mpf(10) ** -(PLACES + magnitude) / 2)


def equal_expressions(one: Any, other: Any) -> bool:
    """Returns whether two SymPy expressions have the same value, wherever both have one."""
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    if one.has(*_SYMPY_ONLY) or other.has(*_SYMPY_ONLY):
        one, other = one.doit(), other.doit()
    if one in _INFINITIES:
        return bool(one == other)
    if one.has(*_NO_VALUES) or other.has(*_NO_VALUES):
        return False
    if one.free_symbols or other.free_symbols:
        return bool(one == other) or _equal_functions(one, other)
    return _equal_constants(one, other)


def _equal_functions(one: Any, other: Any) -> bool:
    """Returns whether two expressions with symbols agree at random points."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    agreed = 0
    for first, second in _samples((one, other), symbols):
        if not _close(first, second):
            return False
        agreed += 1
    if agreed >= POINTS:
        return True
    if one.free_symbols != other.free_symbols or one.count_ops() + other.count_ops() > _MAX_OPS:
        return False
    return _equal_by_sympy(one, other)


def _equal_by_sympy(one: Any, other: Any) -> bool:
    try:
        return bool(sympy.simplify(one - other) == 0)
    except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
        return False


def _equal_constants(one: Any, other: Any) -> bool:
    try:
        first, second = evaluate(one, {}), evaluate(other, {})
    except NoValue:
        return bool(one == other) and not _is_undefined(one)
    return _close(first, second)


def _is_undefined(expression: Any) -> bool:
    """Returns whether a constant has no value, rather than one that is too large to be computed."""
    return bool(expression.has(sympy.zoo, sympy.nan)) or expression.is_finite is False


_INFINITIES = (sympy.oo, -sympy.oo)
_NO_VALUES = (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
_SYMPY_ONLY = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


def _close(one: Any, other: Any) -> bool:
    scale = max(abs(one), abs(other))
    if scale < TOLERANCE and min(abs(one), abs(other)) * 10**20 < scale:
        # Of a sum that is 0, the arithmetic leaves about 10^-60.
        return bool(scale < _CONTEXT.mpf(10) ** -(DIGITS - 8))
    return bool(abs(one - other) <= TOLERANCE * scale)


def _samples(
    expressions: Sequence[Any], symbols: Sequence[Any], needed: int = POINTS
) -> Iterator[tuple[Any, ...]]:
    """Yields the values of expressions at random points at which all are finite.

    At the points that come first, no root or logarithm of a part leaves the reals, whatever the
    signs of the coordinates: \\sqrt{a}\\sqrt{b} is \\sqrt{ab} there. If there are too few of these,
    positive points follow at which they do. Expressions without pieces get `needed` points.
    """
    tries = _TRIES
    if any(map(_has_pieces, expressions)):
        parts = sum(1 for e in expressions for _ in sympy.preorder_traversal(e))
        tries = needed = max(_TRIES, min(_TRIES_IN_PIECES, _MAX_EVALUATIONS // parts))
    complex_values: list[tuple[Any, ...]] = []
    found = 0
    for point, digits in _points(expressions, symbols, tries):
        imaginary: list[Any] = []
        try:
            with _CONTEXT.workdps(digits):
                values = tuple(evaluate(expression, point, imaginary) for expression in expressions)
        except NoValue:
            continue
        if imaginary:
            if min(point.values()) > 0:
                complex_values.append(values)
            continue
        yield values
        found += 1
        if found == needed:
            return
    if found < POINTS:
        yield from complex_values


def _points(
    expressions: Sequence[Any], symbols: Sequence[Any], count: int
) -> Iterator[tuple[dict[Any, Any], int]]:
    """Yields random points of mixed magnitude, and the digits that values need there.

    Every second point is positive, and every third one has integers. All are positive where the
    only pieces are roots of several letters, which are mostly lengths and masses then, so that
    \\sqrt{a^2 b} is a\\sqrt{b}.
    """
    rng = random.Random(0)
    positive = len(symbols) > 1 and not any(e.has(*_PIECEWISE) for e in expressions)
    positive = positive and any(map(_has_pieces, expressions))
    scales = _scales(expressions)
    for attempt in range(count):
        near = attempt % 3 == 0
        point: dict[Any, Any] = {}
        for symbol in symbols:
            scale = rng.choice(_NEAR if near else scales)
            sign = 1 if positive or attempt % 2 == 0 else rng.choice((-1, 1))
            size = scale * Fraction(rng.randint(1, 9_999), rng.choice((9_973, 10_007, 10_009)))
            if attempt % 3 == 2:
                size = Fraction(max(1, round(size)))
            point[symbol] = sign * size
        yield point, DIGITS if near else _FAR_DIGITS


def _scales(expressions: Sequence[Any]) -> list[Fraction]:
    """Returns magnitudes of coordinates for expressions, by their numbers: 20 for |x - 20|."""
    largest = _LARGEST_SCALE
    if any(expression.has(*_GROWING) or _has_power(expression) for expression in expressions):
        largest = _LARGEST_SCALE_OF_POWERS
    numbers = {
        size
        for expression in expressions
        for number in expression.atoms(sympy.Rational)
        for size in (Fraction(number.p, number.q), Fraction(number.q, number.p or 1))
        if Fraction(1, _LARGEST_SCALE) <= abs(size) <= largest and abs(size) != 1
    }
    own = [2 * abs(number) for number in sorted(numbers)[:8]]
    return [scale for scale in (*_SCALES, *own) if scale <= 2 * largest]


def _has_power(expression: Any) -> bool:
    """Returns whether an exponent has a symbol."""
    return any(power.exp.free_symbols for power in expression.atoms(sympy.Pow))


def _has_pieces(expression: Any) -> bool:
    """Returns whether an expression may have other formulas in other regions, as |x| has."""
    return bool(expression.has(*_PIECEWISE)) or any(
        power.exp.is_Rational and not power.exp.is_Integer and power.base.free_symbols
        for power in expression.atoms(sympy.Pow)
    )


_GROWING = (
    *(sympy.exp, sympy.sinh, sympy.cosh, sympy.tanh, sympy.coth),
    *(sympy.factorial, sympy.binomial, sympy.gamma),
)
_PIECEWISE = (
    *(sympy.floor, sympy.ceiling, sympy.Abs, sympy.Max, sympy.Min, sympy.sign, sympy.log),
    *(sympy.re, sympy.im, sympy.arg, sympy.conjugate),
    *(sympy.asin, sympy.acos, sympy.atan, sympy.acot, sympy.asec, sympy.acsc),
)


def _proportional(one: Any, other: Any) -> bool:
    """Returns whether two expressions differ by a constant factor that is not 0."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if one.free_symbols != other.free_symbols or not symbols:
        return False
    ratio: Any = None
    agreed = 0
    for first, second in _samples((one, other), symbols, 2 * POINTS):
        if abs(second) < TOLERANCE or abs(first) < TOLERANCE:
            continue
        quotient = first / second
        if ratio is not None and not _close(quotient, ratio):
            return False
        ratio = quotient
        agreed += 1
    return agreed >= POINTS


# ---- evaluation ---------------------------------------------------------------------------------


def _raise_to(base: Any, exponent: Any) -> Any:
    if base == 0 and _CONTEXT.re(exponent) <= 0:
        raise NoValue("0 has no power of an exponent that is not positive")
    if base != 0 and abs(exponent) * (1 + abs(_CONTEXT.log(abs(base)))) > _LARGEST_EXPONENT:
        raise NoValue("the power is too large")
    return _CONTEXT.power(base, exponent)


def _binomial(top: Any, bottom: Any) -> Any:
    if max(abs(top), abs(bottom)) > _LARGEST_EXPONENT:
        raise NoValue("the binomial coefficient is too large")
    return _CONTEXT.binomial(top, bottom)


def _of_exponent(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that grows like an exponential one, without values too large."""

    def bounded(value: Any) -> Any:
        if abs(value) > _LARGEST_EXPONENT:
            raise NoValue("the value is too large")
        return function(value)

    return bounded


def _of_angle(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a trigonometric function, without a value of angles too large for any digit of it.

    For the sine of e^(10^7), mpmath computes 14 million digits of pi, which takes seconds.
    """

    def bounded(angle: Any) -> Any:
        if abs(angle) > _CONTEXT.mpf(10) ** (_CONTEXT.dps - _DIGITS_OF_ANGLE):
            raise NoValue("too few digits of the angle are known")
        if abs(_CONTEXT.im(angle)) > _LARGEST_EXPONENT:
            raise NoValue("the value is too large")
        return function(angle)

    return bounded


def _floor(value: Any) -> Any:
    if _CONTEXT.im(value):
        raise NoValue("the floor of a complex number")
    nearest = _CONTEXT.nint(_CONTEXT.re(value))
    near = abs(nearest - value) < TOLERANCE
    return nearest if near else _CONTEXT.floor(_CONTEXT.re(value))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *values: _add(values),
    sympy.Mul: lambda *values: _CONTEXT.fprod(values),
    sympy.Pow: _raise_to,
    sympy.exp: lambda x: _raise_to(_CONTEXT.e, x),
    sympy.log: _CONTEXT.log,
    sympy.sin: _of_angle(_CONTEXT.sin),
    sympy.cos: _of_angle(_CONTEXT.cos),
    sympy.tan: _of_angle(_CONTEXT.tan),
    sympy.cot: _of_angle(_CONTEXT.cot),
    sympy.sec: _of_angle(_CONTEXT.sec),
    sympy.csc: _of_angle(_CONTEXT.csc),
    sympy.asin: _CONTEXT.asin,
    sympy.acos: _CONTEXT.acos,
    sympy.atan: _CONTEXT.atan,
    sympy.acot: _CONTEXT.acot,
    sympy.asec: _CONTEXT.asec,
    sympy.acsc: _CONTEXT.acsc,
    sympy.sinh: _of_exponent(_CONTEXT.sinh),
    sympy.cosh: _of_exponent(_CONTEXT.cosh),
    sympy.tanh: _of_exponent(_CONTEXT.tanh),
    sympy.coth: _of_exponent(_CONTEXT.coth),
    sympy.asinh: _CONTEXT.asinh,
    sympy.acosh: _CONTEXT.acosh,
    sympy.atanh: _CONTEXT.atanh,
    sympy.Abs: abs,
    sympy.floor: _floor,
    sympy.ceiling: lambda x: -_floor(-x),
    sympy.factorial: _of_exponent(_CONTEXT.factorial),
    sympy.binomial: _binomial,
    sympy.Max: lambda *values: max(map(_real, values)),
    sympy.Min: lambda *values: min(map(_real, values)),
    sympy.sign: _CONTEXT.sign,
    sympy.re: _CONTEXT.re,
    sympy.im: _CONTEXT.im,
    sympy.arg: _CONTEXT.arg,
    sympy.conjugate: _CONTEXT.conj,
    sympy.gamma: _of_exponent(_CONTEXT.gamma),
}


def _real(value: Any) -> Any:
    if _CONTEXT.im(value):
        raise NoValue("complex numbers have no order")
    return _CONTEXT.re(value)


def evaluate(expression: Any, point: dict[Any, Any], imaginary: list[Any] | None = None) -> Any:
    """Returns the value of an expression at a point, to `DIGITS` digits. Raises `NoValue`.

    imaginary: gets the values of the expression's parts that are not real.
    """
    if expression.is_Rational:
        return _CONTEXT.mpf(expression.p) / expression.q
    if expression.is_Symbol:
        return _CONTEXT.mpf(point[expression].numerator) / point[expression].denominator
    if expression is sympy.pi:
        return +_CONTEXT.pi
    if expression is sympy.E:
        return +_CONTEXT.e
    if expression is sympy.I:
        if imaginary is not None:
            imaginary.append(expression)
        return _CONTEXT.mpc(0, 1)
    function = _FUNCTIONS.get(expression.func)
    if function is None:
        raise NoValue(f"{expression.func} is not evaluated")
    values = [evaluate(argument, point, imaginary) for argument in expression.args]
    try:
        value = _finite(function(*values))
    except (ArithmeticError, ValueError, TypeError, OverflowError) as error:
        raise NoValue(str(error)) from error
    if imaginary is not None and abs(_CONTEXT.im(value)) > TOLERANCE:
        imaginary.append(expression)
    return value


def _add(values: Sequence[Any]) -> Any:
    total = _CONTEXT.fsum(values)
    # Terms that cancel leave nothing but the error of the arithmetic.
    largest = max((abs(value) for value in values), default=0)
    left = _CONTEXT.mpf(10) ** -_CONTEXT.dps * largest
    if largest > _LARGEST_TERM and abs(total) < left * _CONTEXT.mpf(10) ** 50:
        raise NoValue("the terms cancel, and too few digits are left")
    return total if abs(total) > left * 10**8 else _CONTEXT.mpf(0)


def _finite(value: Any) -> Any:
    if not _CONTEXT.isfinite(value):
        raise NoValue("the value is not finite")
    return value


_COMPARISONS: dict[type, Callable[..., bool]] = {
    Items: _equal_items,
    Value: _equal_values,
    Relation: _equal_relations,
    Grid: _equal_grids,
    Joined: _equal_joined,
}
