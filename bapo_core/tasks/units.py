"""Knows the units that a number may have, and compares them by name and exponent."""

from __future__ import annotations

import re

UNITS = {
    **dict.fromkeys(("cm", "centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("mm", "millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("km", "kilometer", "kilometre"), "km"),
    **dict.fromkeys(("m", "meter", "metre"), "m"),
    **dict.fromkeys(("nm", "nanometer", "nanometre"), "nm"),
    **dict.fromkeys(("in", "inch", "inche"), "in"),
    **dict.fromkeys(("ft", "foot", "feet"), "ft"),
    **dict.fromkeys(("yd", "yard"), "yd"),
    **dict.fromkeys(("mi", "mile"), "mi"),
    **dict.fromkeys(("kg", "kilogram"), "kg"),
    **dict.fromkeys(("g", "gram"), "g"),
    **dict.fromkeys(("mg", "milligram"), "mg"),
    **dict.fromkeys(("lb", "pound"), "lb"),
    **dict.fromkeys(("oz", "ounce"), "oz"),
    **dict.fromkeys(("s", "sec", "second"), "s"),
    **dict.fromkeys(("ms", "millisecond"), "ms"),
    **dict.fromkeys(("min", "minute"), "min"),
    **dict.fromkeys(("h", "hr", "hour"), "h"),
    **dict.fromkeys(("day", "d"), "day"),
    **dict.fromkeys(("year", "yr"), "year"),
    **{"a.m": "a.m", "p.m": "p.m"},
    **{unit: unit for unit in ("week", "month", "dollar", "cent", "degree", "radian")},
}
"""Spellings of units, in the singular, and the unit that they mean."""
CURRENCIES = {r"\$": "dollar", "€": "euro", "£": "pound"}
"""Signs of currencies, which may stand before a number, and the unit that they mean."""
_NAMELESS = frozenset(("unit", "units", "people", "points", "mph", "kph", "rpm", "per"))
"""Units that may be the same as others of another spelling, as mph is mi/h."""
_MODIFIERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
"""Words before a unit, and the exponent that they give it."""
OTHER_UNITS = _NAMELESS.union(
    _MODIFIERS,
    re.findall(
        "[a-z]+",
        "degrees degree percent dollars dollar cents cent hz khz mhz ghz ev kev mev gev pa kpa mpa "
        "atm mol rad deg kwh kw mw kj cal kcal ml dl kl watts watt joules volts amps ohms newtons "
        "kelvin celsius usd eur fahrenheit bits bytes gallons liters litres quarts pints cups "
        "years days weeks months",
    ),
)
"""Words in lower case that are units, too, also without a \\text{...} around them."""
_SYNONYMS = {
    **{"C": "celsius", "F": "fahrenheit", "K": "kelvin", "%": "percent"},
    **{"usd": "dollar", "eur": "euro", "euro": "euro", "deg": "degree", "rad": "radian"},
    **{"celsius": "celsius", "litre": "liter"},
}
_TEMPERATURES = frozenset(("celsius", "fahrenheit", "kelvin"))
_PART = re.compile(r"([A-Za-z][A-Za-z.]*|%)|\^\s*([-+]?[0-9]+)|(/)|\s+")
_SPELLED_OUT = ((r"\bper\b", "/"), (r"\bsquared\b", "^2"), (r"\bcubed\b", "^3"))

Quantity = tuple[tuple[str, int], ...]
"""Names of units and their exponents: (("h", -1), ("km", 1)) is km/h."""


def is_unit(text: str) -> bool:
    """Returns whether every word of a text such as `km/h` or `square inches` is a known unit."""
    words = re.findall("[A-Za-z]+", text)
    return not _MODIFIERS.keys() >= set(words) and all(
        word in UNITS if len(word) == 1 else _is_known(word.lower()) for word in words
    )


def _is_known(word: str) -> bool:
    return word in OTHER_UNITS or word in UNITS or word.removesuffix("s") in UNITS


def _name(word: str) -> str | None:
    """Returns the name of a unit, whatever its spelling; None for an unknown or nameless one."""
    if word in _SYNONYMS:
        return _SYNONYMS[word]
    lower = word.strip(".").lower()
    if lower in _NAMELESS:
        return None
    for spelling in (lower, lower.removesuffix("s")):
        if spelling in UNITS or spelling in _SYNONYMS:
            return UNITS.get(spelling) or _SYNONYMS[spelling]
    return lower.removesuffix("s") if lower in OTHER_UNITS else None


def read_quantity(text: str) -> Quantity | None:
    """Returns the units in a text such as `m/s^2`; None if one of them is not known.

    A slash divides by the one unit after it. What follows that unit could belong to either side.
    """
    for words, sign in _SPELLED_OUT:
        text = re.sub(words, sign, text)
    exponents: dict[str, int] = {}
    name, power, position, below = "", 1, 0, False
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        position = part.end()
        word = (part[1] or "").strip(".").lower()
        if part[3]:
            below, name = True, ""
        elif part[2]:
            exponents[name] = exponents.get(name, 0) + (-1 if below else 1) * (int(part[2]) - 1)
        elif word in _MODIFIERS:
            power = _MODIFIERS[word]
        elif part[1]:
            found = _name(part[1])
            if found is None or (below and name):
                return None
            name = found
            exponents[name] = exponents.get(name, 0) + (-power if below else power)
            power = 1
    if len(exponents) > 1 and not _TEMPERATURES.isdisjoint(exponents):
        exponents.pop("degree", None)  # degrees Celsius
    return (
        tuple(sorted((name, power) for name, power in exponents.items() if name and power)) or None
    )


def may_be_equal(one: Quantity | None, other: Quantity | None) -> bool:
    """Returns whether two units may be the same; one that is missing or not known may be any."""
    if one is None or other is None or one == other:
        return True
    # 75° is the short form of 75° F.
    names = {name for quantity in (one, other) for name, _ in quantity}
    return "degree" in names and len(names) == 2 and not _TEMPERATURES.isdisjoint(names)
