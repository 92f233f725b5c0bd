r"""Reads an answer as a structure: a list, a set, an interval, a matrix, a relation or a value.

The parts of a structure are answers themselves. What is neither a structure nor an expression that
can be read as a whole is `Words`, which equals the same words only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bapo_core.tasks.latex import (
    BLANK,
    CLOSING,
    DEGREE,
    OPENING,
    TEXT,
    characters,
    matching,
    trim,
)
from bapo_core.tasks.math_reader import (
    Unreadable,
    function_values,
    has_ambiguous_slash,
    read_expression,
)
from bapo_core.tasks.units import CURRENCIES, OTHER_UNITS, UNITS, Quantity, read_quantity


@dataclass(frozen=True, slots=True)
class Value:
    """An answer that is one expression, which may be a number."""

    expression: Any
    """SymPy expression, in which decimals are exact rational numbers."""
    loose: Any = None
    """The expression if `1/2x` means (1/2)x; None if both readings are the same."""
    product: Any = None
    """The expression if `x(2)` is a product; None without a single value of a function."""
    unit: str = ""
    unit_exponents: tuple[str, ...] = ()
    """The exponents that are written in the unit."""
    quantity: Quantity | None = None
    """The names and exponents of the unit; None without a unit that is known."""
    decimal_places: int | None = None
    """The number of decimal places of a decimal numeral; None for other expressions."""
    base: str = ""
    """The base of a numeral such as 1011_2, as it is written."""


@dataclass(frozen=True, slots=True)
class Items:
    """An answer of several parts: a list without brackets (`opening` is ""), a set, a tuple or an
    interval."""

    opening: str
    closing: str
    items: tuple[Answer, ...]
    ambiguous: bool = False
    """Whether the text is more likely a number than a list, as `100,200` is."""


@dataclass(frozen=True, slots=True)
class Grid:
    """An answer that is a matrix, a determinant or cases."""

    kind: str
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """An answer of parts that one operator joins: `\\cup`, `\\cap`, `\\setminus` or `:`."""

    operator: str
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """An answer that is a chain of equations or inequalities.

    Operator n stands between the sides n and n + 1.
    """

    operators: tuple[str, ...]
    sides: tuple[Answer, ...]
    names: tuple[str, ...]
    """The characters of each side."""


@dataclass(frozen=True, slots=True)
class Words:
    """An answer that is no mathematics, whose text is stored without blanks and marks."""

    text: str


Answer = Value | Items | Grid | Joined | Relation | Words

EQUATION = frozenset(("=", r"\approx", r"\equiv"))
INEQUALITY = frozenset(("<", ">", r"\le", r"\ge", r"\ne"))
_RELATIONS = EQUATION | INEQUALITY | {r"\in"}
_JOINS = ((r"\cup",), (r"\cap",), (r"\setminus",), (":",))
_MATRICES = frozenset(
    ("matrix", "pmatrix", "bmatrix", "array", "smallmatrix", "Bmatrix", "psmallmatrix")
)
_SIGNS = frozenset(("+", "-", r"\cdot", "/", r"\pm", r"\mp"))
_TRIGONOMETRIC = frozenset([r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc"])
_NUMERAL = re.compile(
    r"[-+]?(?:[0-9]*\.([0-9]+)|[0-9]+\.?)(?:(?:[eE]|\\cdot10\^)\{?([-+]?[0-9]+)\}?)?"
)
_BASED = re.compile(r"([-+]?[0-9A-Z.,]*[0-9][0-9A-Z.,]*|[-+]?[A-Z]{2,})_\{?([0-9]+|[a-z]+)\}?")
_PREFIXES = re.compile(
    r"(?:(?:the )?(?:final )?answer(?: is)?:?|is|about|approximately|approx\.?|roughly|around|"
    r"exactly|(?:a )?total(?: of)?|or)",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(
    r"\b(?:not?|or|and|if|when|where|more|less|fewer|than|least|most|except|for|mod|is|are|to|from|"
    r"thousand|million|billion|trillion|hundred|dozen|half|halves|third|quarter|negative|minus|plus|"
    r"times|pairs?|over|by|only if|otherwise)\b|[0-9<>=\\]",
    re.IGNORECASE,
)
_UNIT_EXPONENT = re.compile(r"\^\{?-?[0-9]\}?")


def read_answer(tokens: Sequence[str]) -> list[Answer]:
    """Returns the readings of an answer's normalised tokens, the likeliest first.

    There are two where commas may separate thousands or the elements of a list.
    """
    merged, ambiguous = _merge_thousands(tokens)
    readings = [_read(merged)]
    if ambiguous:
        listed = _read(_merge_thousands(tokens, commas=False)[0])
        if isinstance(listed, Items):
            readings.append(Items("", "", listed.items, ambiguous=True))
    return readings


def _merge_thousands(tokens: Sequence[str], commas: bool = True) -> tuple[list[str], bool]:
    """Removes the separators of thousands; returns also whether plain commas were among them."""
    merged: list[str] = []
    ambiguous, depth, position = False, 0, 0
    while position < len(tokens):
        token = tokens[position]
        depth += (token in OPENING and token != "{") - (token in CLOSING and token != "}")
        end = _digits_end(tokens, position)
        starts_number = end > position and (not merged or merged[-1] not in (".", "_", "^"))
        if not starts_number:
            merged.extend(tokens[position : max(end, position + 1)])
            position = max(end, position + 1)
            continue
        plain = padded = False
        length = end - position
        merged.extend(tokens[position:end])
        first_is_zero = tokens[position] == "0"
        position = end
        while length <= 3 and not first_is_zero:
            separated = _separator_end(tokens, position)
            if separated is None:
                break
            start, is_plain = separated
            stop = _digits_end(tokens, start)
            if stop - start != 3 or (is_plain and (depth > 0 or not commas)):
                break
            if tokens[position] == BLANK and stop < len(tokens) and tokens[stop] == "/":
                break
            plain, padded = plain or is_plain, padded or tokens[start] == "0"
            merged.extend(tokens[start:stop])
            position = stop
        ambiguous = ambiguous or (plain and not padded)
    return [token for token in merged if token != r"\!"], ambiguous


def _digits_end(tokens: Sequence[str], position: int) -> int:
    while position < len(tokens) and tokens[position].isdigit():
        position += 1
    return position


def _separator_end(tokens: Sequence[str], position: int) -> tuple[int, bool] | None:
    """Returns the position after a separator of thousands, and whether it is a plain comma."""
    if tuple(tokens[position : position + 3]) == ("{", ",", "}"):
        return position + 3, False
    following = tuple(tokens[position : position + 2])
    if following[:1] == (",",):
        start = position + 1
        while start < len(tokens) and tokens[start] in (r"\!", BLANK):
            start += 1
        if r"\!" in tokens[position:start]:
            return start, False
        return position + 1, True
    if following[:1] == (BLANK,):
        return position + 1, False
    if following[:1] == (r"\!",):
        return position + 1, False
    return None


# ---- structures ---------------------------------------------------------------------------------


def _split(
    tokens: Sequence[str], separators: AbstractSet[str]
) -> tuple[list[list[str]], list[str]]:
    """Splits tokens at separators outside brackets; returns also the separators."""
    parts: list[list[str]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0 and token in separators:
            parts.append([])
            found.append(token)
        else:
            parts[-1].append(token)
    return parts, found


def _read(tokens: Sequence[str]) -> Answer:
    tokens = trim(tokens)
    parts, _ = _split(tokens, {",", ";"})
    parts = [part for part in map(trim, parts) if part]
    if len(parts) > 1:
        return _read_list(parts)
    tokens = _without_prefix(tokens)
    sides, operators = _split(tokens, _RELATIONS)
    if operators:
        return _read_relation(tokens, sides, operators)
    for join in _JOINS:
        parts, found = _split(tokens, set(join))
        if found and all(map(trim, parts)):
            return Joined(join[0], tuple(map(_read, parts)))
    currency = next((token for token in tokens if token in CURRENCIES), "")
    if currency:
        tokens = trim([token for token in tokens if token not in CURRENCIES])
    grid = _read_grid(tokens)
    if grid is not None:
        return grid
    bracketed = _read_brackets(tokens)
    if bracketed is not None:
        return bracketed
    if r"\pm" in tokens or r"\mp" in tokens:
        branches = [[_SIGN_OF[branch].get(t, t) for t in tokens] for branch in (0, 1)]
        return Items("", "", tuple(map(_read, branches)))
    return _read_value(tokens, CURRENCIES.get(currency, ""))


_SIGN_OF = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})


def _without_prefix(tokens: Sequence[str]) -> list[str]:
    """Returns tokens without words in front such as "about" that do not change the value."""
    first = tokens[0] if len(tokens) > 1 else ""
    if first.startswith(TEXT) and _PREFIXES.fullmatch(first[len(TEXT) : -1].strip()):
        return trim(tokens[1:])
    return list(tokens)


def _read_list(parts: Sequence[Sequence[str]]) -> Items:
    first, *others = parts
    sides, operators = _split(first, _RELATIONS)
    if operators == ["="] and not any(_split(part, _RELATIONS)[1] for part in others):
        first = sides[1]  # This is the 1 of `x = 1, 2`.
    items: list[Answer] = []
    for part in (first, *others):
        answer = _read(part)
        # A part may be a list itself, as in `x = \pm 1, 3`.
        items.extend(answer.items if _is_plain_list(answer) else (answer,))  # type: ignore[union-attr]
    return Items("", "", tuple(items))


def _is_plain_list(answer: Answer) -> bool:
    return isinstance(answer, Items) and not answer.opening


def _read_relation(
    tokens: Sequence[str], sides: Sequence[Sequence[str]], operators: Sequence[str]
) -> Answer:
    sides = [trim(side) for side in sides]
    if not all(sides):
        # `= 5` means 5. Anything else that lacks a side is no relation.
        if operators[0] in EQUATION and not sides[0] and len(sides) == 2 and sides[1]:
            return _read(sides[1])
        return Words(characters(tokens))
    if operators[0] == r"\in" and len(sides) == 2:
        return _read(sides[1])
    return Relation(
        tuple("=" if operator in EQUATION else operator for operator in operators),
        tuple(map(_read, sides)),
        tuple(map(characters, sides)),
    )


def _read_grid(tokens: Sequence[str]) -> Grid | None:
    """Reads an environment, which may stand in brackets and after a factor."""
    if list(tokens).count(r"\begin") != 1:
        return None
    start = list(tokens).index(r"\begin")
    factor, body = trim(tokens[:start]), trim(tokens[start:])
    bar = False
    if factor and factor[-1] in ("(", "[", "|") and body[-1] in (")", "]", "|"):
        bar = factor[-1] == "|"
        factor, body = trim(factor[:-1]), trim(body[:-1])
    close = matching(body, 1)
    if close is None or r"\end" not in body:
        return None
    kind, stop = "".join(body[2:close]), body.index(r"\end")
    if "".join(body[stop:]) != rf"\end{{{kind}}}":
        return None
    content = body[close + 1 : stop]
    if kind == "array" and content[:1] == ["{"]:
        content = content[
            (matching(content, 0) or 0) + 1 :
        ]  # The alignment of the columns is left out.
    if kind in _MATRICES:
        kind = "vmatrix" if bar else "matrix"
    return Grid(kind, tuple(_read_rows(content, _multiplier(factor))))


def _multiplier(factor: Sequence[str]) -> list[str]:
    if factor and factor[-1] == r"\cdot":
        factor = trim(factor[:-1])
    return ["-", "1"] if list(factor) == ["-"] else list(factor)


def _read_rows(content: Sequence[str], multiplier: Sequence[str]) -> Iterator[tuple[Answer, ...]]:
    for number, row in enumerate(_split(content, {r"\\"})[0]):
        cells = [token for token in row if token != r"\hline"]
        if number and cells[:1] == ["["] and "]" in cells and cells[-1] != "]":
            cells = cells[cells.index("]") + 1 :]  # `[2ex]` is the distance between rows.
        if trim(cells):
            yield tuple(_times(multiplier, cell) for cell in _split(cells, {"&"})[0])


def _times(multiplier: Sequence[str], cell: Sequence[str]) -> Answer:
    return _read(cell) if not multiplier else _read_value(["(", *multiplier, ")", "(", *cell, ")"])


def _read_brackets(tokens: Sequence[str]) -> Answer | None:
    if list(tokens) == [r"\emptyset"]:
        return Items(r"\{", r"\}", ())
    if not tokens or tokens[0] not in ("(", "[", r"\{", r"\langle"):
        return None
    if _closing_position(tokens) != len(tokens) - 1:
        return None
    opening, closing = (
        {r"\langle": "(", r"\rangle": ")"}.get(token, token) for token in (tokens[0], tokens[-1])
    )
    content = trim(tokens[1:-1])
    if not content:
        return Items(opening, closing, ()) if opening == r"\{" else None
    if (
        opening == r"\{"
        and ("|" in content or ":" in content)
        and (len(_split(content, {"|", ":"})[0]) == 2)
    ):
        return Words(characters(tokens))  # `{x : x > 0}` is compared as text.
    parts = [part for part in map(trim, _split(content, {",", ";"})[0]) if part]
    if len(parts) == 1 and opening != r"\{":
        return _read(content) if (opening, closing) in (("(", ")"), ("[", "]")) else None
    return Items(opening, closing, tuple(map(_read, parts)))


def _closing_position(tokens: Sequence[str]) -> int | None:
    """Returns where the bracket that opens the tokens is closed; None if it is not."""
    depth = 0
    for position, token in enumerate(tokens):
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return position
    return None


# ---- values -------------------------------------------------------------------------------------


def _read_value(tokens: Sequence[str], currency: str = "") -> Answer:
    plain = characters(tokens)
    if len(plain) > 2 and plain.isalpha() and plain.isascii() and plain.isupper():
        return Words(plain)  # These are the vertices of a figure and no product.
    based = _BASED.fullmatch(characters(tokens, braces=True))
    if based is not None:
        return Value(_digits(based[1]), base=based[2])
    for number, unit, quantity in _unit_splits(tokens):
        if DEGREE in number and not _is_angle(number):
            number = [token for token in number if token != DEGREE]
            unit, quantity = unit or "degree", quantity or read_quantity("degree")
        if not number or _is_prose(number):
            continue
        try:
            expression = read_expression(number)
            loose = None
            if "/" in number and has_ambiguous_slash(number):
                loose = read_expression(number, loose_slash=True)
            product = None
            if "(" in number and len(function_values(expression)) == 1:
                product = read_expression(number, as_products=True)
        except Unreadable:
            continue
        except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
            continue  # SymPy refuses some values, such as \log_1 2.
        exponents = _exponents(tokens[len(number) :]) if unit else ()
        quantity = quantity or read_quantity(currency)
        places = _decimal_places(number)
        unit = unit or currency
        return Value(expression, loose, product, unit, exponents, quantity, places)
    return Words(plain if any(map(str.isdigit, plain)) or "\\" in plain else plain.casefold())


def _is_prose(tokens: Sequence[str]) -> bool:
    """Returns whether two words of two letters or more are neighbours: "The answer is 42"."""
    words = 0
    for run in "".join(t if len(t) == 1 else "\\" for t in tokens).split(BLANK):
        words = words + 1 if len(run) > 1 and run.isalpha() else 0
        if words == 2:
            return True
    return False


def _is_angle(tokens: Sequence[str]) -> bool:
    """Returns whether degrees stand in the argument of a function, where they are no unit."""
    return not _TRIGONOMETRIC.isdisjoint(tokens)


def _digits(text: str) -> Any:
    from sympy import Symbol

    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text.removeprefix("+"))
    return Symbol(sign + (digits.replace(",", "").lstrip("0") or "0"))


def _decimal_places(tokens: Sequence[str]) -> int | None:
    numeral = _NUMERAL.fullmatch("".join(t for t in tokens if t not in (BLANK, r"\!")))
    if numeral is None or numeral[1] is None:
        return None
    return len(numeral[1]) - int(numeral[2] or 0)


def _unit_splits(tokens: Sequence[str]) -> Iterator[tuple[list[str], str, Quantity | None]]:
    """Yields (tokens of the number, unit, its names) for the places where a unit may begin."""
    tokens = list(tokens)
    if tokens and (tokens[-1] == "%" or (tokens[-1] == DEGREE and not _is_angle(tokens))):
        unit = "%" if tokens[-1] == "%" else "degree"
        yield trim(tokens[:-1]), unit, read_quantity(unit)
        return
    if tokens[-1:] in (["C"], ["F"]) and trim(tokens[:-1])[-1:] == [DEGREE]:
        yield trim(trim(tokens[:-1])[:-1]), "degree", read_quantity(tokens[-1])
        return
    for start in range(1, len(tokens)):
        unit = _unit_from(tokens, start)
        if unit:
            number = trim(tokens[:start])
            if number and number[-1] not in _SIGNS and number[-1] not in ("^", "_"):
                yield number, unit, read_quantity(_plain(tokens[start:]))
                return
    yield tokens, "", None


def _plain(tokens: Sequence[str]) -> str:
    """Returns the characters of a unit's tokens without braces, and blanks for \\cdot."""
    text = "".join(token[len(TEXT) : -1] if token.startswith(TEXT) else token for token in tokens)
    return re.sub("[{}]", "", text.replace(r"\cdot", " ").replace(DEGREE, " degree "))


def _unit_from(tokens: Sequence[str], start: int) -> str:
    """Returns the unit that begins at `start` and ends the tokens; "" if there is none."""
    words: list[str] = []
    position = start
    if tokens[start].startswith(TEXT):
        pass
    elif not (tokens[start].isalpha() and len(tokens[start]) == 1) or (
        len(tokens[start - 1]) == 1 and tokens[start - 1].isalpha()
    ):
        return ""
    while position < len(tokens):
        token = tokens[position]
        if token.startswith(TEXT):
            words.append(_UNIT_EXPONENT.sub(" ", token[len(TEXT) : -1]))
            position += 1
        elif len(token) == 1 and token.isalpha():
            end = position
            while end < len(tokens) and len(tokens[end]) == 1 and tokens[end].isalpha():
                end += 1
            word = "".join(tokens[position:end])
            follows = bool(words) and (
                len(word) > 1 or (tokens[position - 1] == "/" and word in UNITS)
            )
            if not follows and not _is_unit_word(word, tokens[:start]):
                return ""
            words.append(word)
            position = end
        elif token in (BLANK, "^", "{", "}", "/", r"\cdot", "-", ".", DEGREE) or token.isdigit():
            if token.isdigit() and tokens[position - 1] not in ("^", "{", "-") and token != "1":
                return ""
            position += 1
        else:
            return ""
    text = " ".join(" ".join(words).split())
    return "" if _NO_UNIT.search(text) or not text else text


_POWERS = {"square": "2", "squared": "2", "sq": "2", "cubic": "3", "cubed": "3", "cu": "3"}


def _exponents(tokens: Sequence[str]) -> tuple[str, ...]:
    """Returns the exponents in the tokens of a unit, with 2 for "square" and 3 for "cubic"."""
    words = [word for t in tokens if t.startswith(TEXT) for word in t[len(TEXT) : -1].split()]
    named = [
        _POWERS[word.strip(".").lower()] for word in words if word.strip(".").lower() in _POWERS
    ]
    written = re.findall(r"\^\{?([-+0-9]+)", "".join(t for t in tokens if t != BLANK))
    return tuple(named or written)


def _is_unit_word(word: str, before: Sequence[str]) -> bool:
    singular = word.lower().removesuffix("s")
    if len(word) < 2:
        return False
    if word.lower() in OTHER_UNITS or (singular in UNITS and len(singular) > 1):
        return True
    numeric = all(t.isdigit() or t in (".", BLANK, "-", r"\!") for t in before)
    return numeric and len(word) > 3 and before[-1] == BLANK


def unread_parts(answer: Answer) -> Iterator[str]:
    """Yields the texts of the parts of an answer that are no mathematics."""
    match answer:
        case Words():
            yield answer.text
        case Items() | Joined():
            for item in answer.items:
                yield from unread_parts(item)
        case Relation():
            for side in answer.sides:
                yield from unread_parts(side)
        case Grid():
            for row in answer.rows:
                for cell in row:
                    yield from unread_parts(cell)


def is_arithmetic(answer: Answer) -> bool:
    """Returns whether an answer or a part of it equates two numbers, as `10 + 5 = 15` does."""
    match answer:
        case Relation():
            numbers = [isinstance(s, Value) and s.expression.is_number for s in answer.sides]
            return set(answer.operators) == {"="} and sum(numbers) > 1
        case Items() | Joined():
            return any(map(is_arithmetic, answer.items))
    return False


def units_of(answer: Answer) -> Iterator[str]:
    """Yields the units of an answer's values."""
    match answer:
        case Value():
            yield answer.unit
        case Items() | Joined():
            for item in answer.items:
                yield from units_of(item)
        case Relation():
            for side in answer.sides:
                yield from units_of(side)


def as_fraction(value: Value) -> Fraction | None:
    """Returns the exact value of a rational number; None for another value."""
    expression = value.expression
    return Fraction(expression.p, expression.q) if expression.is_Rational else None
