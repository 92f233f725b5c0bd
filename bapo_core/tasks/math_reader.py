r"""Reads the tokens of one mathematical expression as a SymPy expression.

latex2sympy, the parser of Math-Verify, takes `2 3` for 5, `I_0` for the imaginary unit, `x'` and
`X` for x, and `\gamma(x)` for a function, and takes 1 to 90 ms. So it reads only integrals, sums,
products and limits, which this module does not read. Every expression is read as a whole or not at
all.
Decimals are exact rational numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sympy
from sympy import Add, E, I, Integer, Pow, Rational, Symbol, oo, pi

from bapo_core.tasks.latex import BLANK, CLOSING, DEGREE, TEXT, matching, trim

MAX_BITS = 200_000
"""Bits of a power; a larger one is compared as text."""
MAX_FACTORIAL = 10_000
"""Largest number of a factorial or a binomial coefficient."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    r"\sin": sympy.sin,
    r"\cos": sympy.cos,
    r"\tan": sympy.tan,
    r"\cot": sympy.cot,
    r"\sec": sympy.sec,
    r"\csc": sympy.csc,
    r"\arcsin": sympy.asin,
    r"\arccos": sympy.acos,
    r"\arctan": sympy.atan,
    r"\sinh": sympy.sinh,
    r"\cosh": sympy.cosh,
    r"\tanh": sympy.tanh,
    r"\coth": sympy.coth,
    r"\exp": sympy.exp,
    r"\ln": sympy.log,
    r"\lg": lambda x: sympy.log(x, 10),
    r"\log": lambda x: sympy.log(x, 10),
}
_INVERSES: dict[str, Callable[..., Any]] = {
    r"\sin": sympy.asin,
    r"\cos": sympy.acos,
    r"\tan": sympy.atan,
    r"\cot": sympy.acot,
    r"\sec": sympy.asec,
    r"\csc": sympy.acsc,
    r"\sinh": sympy.asinh,
    r"\cosh": sympy.acosh,
    r"\tanh": sympy.atanh,
}
_MANY = {
    r"\max": sympy.Max,
    r"\min": sympy.Min,
    r"\gcd": lambda *values: _of_integers(r"\gcd", sympy.gcd_list, values),
    r"\lcm": lambda *values: _of_integers(r"\lcm", sympy.lcm_list, values),
}
_ACCENTS = frozenset(
    [
        r"\mathbf",
        r"\mathbb",
        r"\mathcal",
        r"\mathfrak",
        r"\mathit",
        r"\mathsf",
        r"\vec",
        r"\hat",
        r"\bar",
        r"\tilde",
        r"\widehat",
        r"\dot",
        r"\overline",
        r"\overrightarrow",
        r"\overleftrightarrow",
        r"\widetilde",
        r"\ddot",
        r"\bm",
        r"\boldsymbol",
        r"\mathscr",
        r"\overset",
        r"\operatorname",
        r"\underline",
    ]
)
_FONTS = frozenset((r"\mathbf", r"\mathit", r"\mathsf", r"\bm", r"\boldsymbol"))
_FIGURES = frozenset((r"\angle", r"\triangle", r"\measuredangle"))
_GREEK = frozenset(
    [
        r"\alpha",
        r"\beta",
        r"\gamma",
        r"\delta",
        r"\epsilon",
        r"\zeta",
        r"\eta",
        r"\theta",
        r"\iota",
        r"\kappa",
        r"\lambda",
        r"\mu",
        r"\nu",
        r"\xi",
        r"\rho",
        r"\sigma",
        r"\tau",
        r"\upsilon",
        r"\phi",
        r"\chi",
        r"\psi",
        r"\omega",
        r"\Gamma",
        r"\Delta",
        r"\Theta",
        r"\Lambda",
        r"\Xi",
        r"\Pi",
        r"\Sigma",
        r"\Upsilon",
        r"\Phi",
        r"\Psi",
        r"\Omega",
        r"\hbar",
        r"\ell",
        r"\nabla",
        r"\partial",
        r"\varrho",
        r"\varsigma",
        r"\varkappa",
    ]
)
_BY_LATEX2SYMPY = frozenset((r"\int", r"\sum", r"\prod", r"\lim", r"\iint"))
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}"}
_IN_NUMERAL = frozenset((*"0123456789./+-{}", r"\frac", r"\pi", BLANK, r"\!"))
"""Tokens of a number that stands alone in brackets."""
_FUNCTION_MARK = re.compile(r"\{?-1\}?|\{\(.*\)\}")
"""Exponents that make a letter an inverse function or a derivative: f^{-1}(0), f^{(2)}(0)."""
_STOPS = frozenset(
    [
        r"+",
        r"-",
        r"\cdot",
        r"/",
        r")",
        r"]",
        r"}",
        r"|",
        r",",
        r";",
        r"=",
        r"<",
        r">",
        r"\rfloor",
        r"\rceil",
        r"\}",
        r"\rangle",
        r"\le",
        r"\ge",
        r"\ne",
        r"\in",
        r"\cup",
        r"\cap",
        r":",
        r"&",
        r"\\",
        r"\pm",
        r"\mp",
        r"\to",
        r"\approx",
        r"\equiv",
        r"\setminus",
    ]
)
"""Tokens that cannot begin a factor."""


class Unreadable(ValueError):
    """Raised for tokens that are no expression, or an expression of several meanings."""


def read_expression(
    tokens: Sequence[str], *, loose_slash: bool = False, as_products: bool = False
) -> Any:
    """Returns the SymPy expression of all tokens. Raises `Unreadable`.

    loose_slash: whether `1/2x` is (1/2)x instead of 1/(2x). as_products: whether `f(2)` is a
    product instead of the value of a function; `f(0)` is never.
    """
    by_latex2sympy = not _BY_LATEX2SYMPY.isdisjoint(tokens)
    if (
        r"\infty" in tokens
        and not by_latex2sympy
        and not set(tokens) <= {r"\infty", "+", "-", BLANK}
    ):
        raise Unreadable("arithmetic with infinity has no value")
    if by_latex2sympy:
        return _read_by_latex2sympy(tokens)
    reader = _Reader(tokens, loose_slash, as_products)
    expression = reader.sum()
    reader.skip_blanks()
    if reader.position < len(tokens):
        raise Unreadable(f"{reader.peek()} does not continue the expression")
    return expression


def has_ambiguous_slash(tokens: Sequence[str]) -> bool:
    """Returns whether a factor without a sign of multiplication follows a slash, as in `1/2x`."""
    reader = _Reader(tokens, False)
    try:
        reader.sum()
    except Unreadable:
        return False
    return reader.ambiguous_slash


def _read_by_latex2sympy(tokens: Sequence[str]) -> Any:
    from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped]
        ConversionConfig,
        latex2sympy,
    )

    text = "".join(
        f"{token} " if token.startswith("\\") and token[1:].isalpha() else token
        for token in tokens
        if token != r"\!"
    )
    config = ConversionConfig(lowercase_symbols=False)
    try:
        expression = latex2sympy(text, conversion_config=config, normalization_config=None)
        return expression.replace(lambda e: e.is_Float, lambda e: Rational(str(e)))
    except MemoryError:
        raise
    except Exception as error:
        # latex2sympy raises the plain Exception for texts that are not in its grammar.
        raise Unreadable(str(error)) from error


class _Reader:
    """Parses tokens by recursive descent; each method reads one rule of the grammar."""

    def __init__(self, tokens: Sequence[str], loose_slash: bool, as_products: bool = False) -> None:
        self.tokens = tokens
        self.position = 0
        self.loose_slash = loose_slash
        self.as_products = as_products
        self.ambiguous_slash = False
        self.in_absolute = False

    # ---- tokens ---------------------------------------------------------------------------------

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def skip_blanks(self) -> bool:
        begin = self.position
        while self.peek() in (BLANK, r"\!"):
            self.position += 1
        return self.position > begin

    def take(self, token: str) -> bool:
        self.skip_blanks()
        if self.peek() != token:
            return False
        self.position += 1
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise Unreadable(f"{token} is missing")

    def argument(self) -> list[str]:
        """Returns the tokens of a TeX argument: a group, or one token."""
        self.skip_blanks()
        token = self.peek()
        if not token or token in CLOSING:
            raise Unreadable("an argument is missing")
        if token != "{":
            self.position += 1
            return [token]
        end = matching(self.tokens, self.position)
        if end is None:
            raise Unreadable("a brace is not closed")
        content = list(self.tokens[self.position + 1 : end])
        self.position = end + 1
        return content

    def read_argument(self) -> Any:
        # \frac\pi2 and x^\pi have a command without its own arguments.
        self.skip_blanks()
        token = self.peek()
        if token in (r"\frac", r"\sqrt", r"\binom"):
            return self.factor_base()
        return self._read(self.argument())

    def _read(self, tokens: Sequence[str]) -> Any:
        return read_expression(tokens, loose_slash=self.loose_slash, as_products=self.as_products)

    # ---- grammar --------------------------------------------------------------------------------

    def sum(self) -> Any:
        terms = [self.term()]
        while True:
            self.skip_blanks()
            if self.peek() == "+":
                self.position += 1
                terms.append(self.term())
            elif self.peek() == "-":
                self.position += 1
                terms.append(-self.term())
            else:
                return Add(*terms) if len(terms) > 1 else terms[0]

    def term(self) -> Any:
        self.skip_blanks()
        if self.peek() == "-":
            self.position += 1
            return -self.term()
        if self.peek() == "+":
            self.position += 1
            return self.term()
        product = self.juxtaposed()
        while True:
            self.skip_blanks()
            if self.peek() == r"\cdot":
                self.position += 1
                product = product * self.signed_factors()
            elif self.peek() == "/":
                self.position += 1
                product = self._divide(product)
            elif self.loose_slash and self._begins_factor():
                product = product * self.juxtaposed()
            else:
                return product

    def signed_factors(self) -> Any:
        self.skip_blanks()
        if self.peek() in ("-", "+"):
            sign = self.peek()
            self.position += 1
            value = self.signed_factors()
            return -value if sign == "-" else value
        return self.juxtaposed()

    def _divide(self, numerator: Any) -> Any:
        self.skip_blanks()
        if self.peek() == "-":
            self.position += 1
            return -self._divide(numerator)
        begin = self.position
        first = self.factor()
        if not self._begins_factor():
            return numerator / first
        self.ambiguous_slash = True
        if self.loose_slash:
            return numerator / first
        self.position = begin
        return numerator / self.juxtaposed()

    def juxtaposed(self) -> Any:
        """Reads factors without a sign of multiplication between them."""
        self.skip_blanks()
        begin = self.position
        mixed = self.mixed_number()
        product = mixed if mixed is not None else self.factor()
        last_is_number = self._is_numeral(begin)
        while self._begins_factor():
            self.skip_blanks()
            if last_is_number and (self.peek().isdigit() or self.peek() == "."):
                raise Unreadable("two numbers have no sign between them")
            begin = self.position
            product = product * self.factor()
            last_is_number = self._is_numeral(begin)
        return product

    def _is_numeral(self, begin: int) -> bool:
        """Returns whether the tokens from `begin` to here are a numeral alone."""
        return all(
            token.isdigit() or token in (".", BLANK, r"\!")
            for token in self.tokens[begin : self.position]
        )

    def _begins_factor(self) -> bool:
        begin = self.position
        self.skip_blanks()
        token = self.peek()
        words = token.startswith(TEXT) and _text_letter(token) is None
        stops = not token or token in _STOPS or words or token in ("^", "_", "!", "'")
        opens_bar = token == "|" and not self.in_absolute and self._bar_opens()
        if stops and not opens_bar:
            self.position = begin
            return False
        return True

    def _bar_opens(self) -> bool:
        return "|" in self.tokens[self.position + 1 :]

    def mixed_number(self) -> Any:
        r"""Reads `3 1/2` and `3\frac{1}{2}`; returns None if there is no mixed number."""
        begin = self.position
        while self.peek().isdigit():
            self.position += 1
        if self.position == begin:
            return None
        whole = "".join(self.tokens[begin : self.position])
        blank = self.skip_blanks()
        fraction = None
        if self.peek() == r"\frac":
            self.position += 1
            try:
                fraction = ["".join(self.argument()).replace(BLANK, "") for _ in range(2)]
            except Unreadable:
                fraction = None
        elif blank and self.peek().isdigit():
            fraction = self._slashed()
        if fraction is None or not all(map(str.isdigit, fraction)) or self.peek() == "^":
            self.position = begin
            return None
        if int(fraction[0]) >= int(fraction[1]):
            raise Unreadable("a mixed number or a product with an improper fraction")
        return Integer(whole) + Rational(int(fraction[0]), int(fraction[1]))

    def _slashed(self) -> list[str] | None:
        parts = ["", ""]
        for index in range(2):
            if index:
                self.skip_blanks()
                if self.peek() != "/":
                    return None
                self.position += 1
                self.skip_blanks()
            while self.peek().isdigit():
                parts[index] += self.peek()
                self.position += 1
        return parts

    def factor(self) -> Any:
        self.skip_blanks()
        base = self.factor_base()
        while True:
            begin = self.position
            self.skip_blanks()
            token = self.peek()
            if token == "^":
                self.position += 1
                start, is_letter = self.position, base.is_Symbol
                base = power(base, self.exponent())
                mark = "".join(self.tokens[start : self.position]).replace(BLANK, "")
                if is_letter and _FUNCTION_MARK.fullmatch(mark):
                    base = self._applied(base, f"{base}")
            elif token == "!":
                self.position += 1
                if self.peek() == "!":
                    raise Unreadable("a double factorial")
                base = factorial(base)
            elif token == DEGREE:
                self.position += 1
                base = base * pi / 180
            elif token == "%":
                self.position += 1
                base = base / 100
            else:
                self.position = begin
                return base

    def exponent(self) -> Any:
        self.skip_blanks()
        if self.peek() == "-":  # TeX would print 10^-3 with the minus sign alone raised.
            self.position += 1
            return -self.exponent()
        if self.peek().isdigit():
            # TeX reads 2^10 as 2^1 0, but people mean the number 10.
            numeral = self._digits()
            value: Any = Integer(numeral)
        elif self.peek() == "(":
            value = self.factor_base()
        else:
            value = self.read_argument()
        if self.take("^"):
            value = power(value, self.exponent())
        return value

    def _digits(self) -> str:
        begin = self.position
        while self.peek().isdigit():
            self.position += 1
        return "".join(self.tokens[begin : self.position])

    def factor_base(self) -> Any:
        self.skip_blanks()
        token = self.peek()
        if not token:
            raise Unreadable("an operand is missing")
        if (token.isascii() and token.isdigit()) or token == ".":
            return self.number()
        read = _RULES.get(token)
        if read is None:
            self.position += token != "{"
            return self._group() if token == "{" else self._symbol(token)
        self.position += 1
        return read(self)

    def _group(self) -> Any:
        return self._read(self.argument())

    def _binomial(self) -> Any:
        return binomial(self.read_argument(), self.read_argument())

    def _enclosed(self, closing: str) -> Any:
        outer, self.in_absolute = self.in_absolute, closing == "|"
        value = self.sum()
        self.in_absolute = outer
        self.expect(closing)
        return value

    def _listed(self) -> list[Any]:
        self.skip_blanks()
        closing = _CLOSING.get(self.peek())
        if closing is None:
            raise Unreadable("a function of several numbers has no list")
        self.position += 1
        values = [self.sum()]
        while self.take(","):
            values.append(self.sum())
        self.expect(closing)
        return values

    def _fraction(self) -> Any:
        top = self.read_argument()
        bottom = self.read_argument()
        if bottom == 0:
            return sympy.zoo
        return top / bottom

    def _root(self) -> Any:
        degree: Any = Integer(2)
        if self.take("["):
            degree = self._enclosed("]")
        self.skip_blanks()
        if self.peek() == "(":
            radicand = self.factor_base()
        else:
            radicand = self.read_argument()
        if degree.is_Integer and degree % 2 and radicand.is_Rational and radicand < 0:
            return -power(-radicand, 1 / degree)
        if degree == 0:
            return sympy.nan
        return power(radicand, 1 / degree)

    def _function(self, token: str) -> Any:
        function = _FUNCTIONS[token]
        exponent: Any = None
        while True:
            self.skip_blanks()
            if self.peek() == "^" and exponent is None:
                self.position += 1
                exponent = self.exponent()
                if exponent == -1 and token in _INVERSES:
                    function, exponent = _INVERSES[token], None
            elif self.peek() == "_" and token == r"\log":
                self.position += 1
                base = self.read_argument()
                function = lambda x, base=base: sympy.log(x, base)  # noqa: E731
            else:
                break
        value = function(self._function_argument())
        return value if exponent is None else power(value, exponent)

    def _function_argument(self) -> Any:
        self.skip_blanks()
        if self.peek() in ("(", "[", r"\{"):
            closing = _CLOSING[self.peek()]
            self.position += 1
            argument = self._enclosed(closing)
            return argument * pi / 180 if self.take(DEGREE) else argument
        if self.peek() == "-":
            self.position += 1
            return -self._function_argument()
        if self.peek() in _FUNCTIONS:
            return self.factor()
        argument = self.factor()
        while self._begins_factor() and self.peek() not in (*_FUNCTIONS, "(", "["):
            argument = argument * self.factor()
        self.skip_blanks()
        if self.peek() == "/":  # \cos \pi/3 means cos(pi/3).
            self.position += 1
            argument = argument / self.factor()
        return argument

    def number(self) -> Any:
        digits, decimals = self._digits(), ""
        if self.peek() == ".":
            self.position += 1
            decimals = self._digits()
            repeating = self._repeating()
            if not digits and not decimals and not repeating:
                raise Unreadable("a full stop")
            value = Rational(int(digits + decimals or "0"), 10 ** len(decimals))
            if repeating:
                value += Rational(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(decimals))
        else:
            value = Integer(digits)
        return self._scientific(value)

    def _repeating(self) -> str:
        if self.peek() not in (r"\overline", r"\bar", r"\dot", r"\widehat"):
            return ""
        self.position += 1
        digits = "".join(self.argument()).replace(BLANK, "")
        if not digits.isdigit():
            raise Unreadable("a repeating decimal without digits")
        return digits

    def _scientific(self, mantissa: Any) -> Any:
        """Reads the exponent of 4.5e33; `2e` and `2e^x` have Euler's number."""
        if self.peek() not in ("e", "E"):
            return mantissa
        begin = self.position
        self.position += 1
        sign = self.peek() if self.peek() in ("-", "+") else ""
        self.position += bool(sign)
        exponent = self._digits()
        if not 1 <= len(exponent) <= 3 or self.peek() == ".":
            self.position = begin
            return mantissa
        return mantissa * power(Integer(10), Integer(int(sign + exponent)))

    def _symbol(self, token: str) -> Any:
        if token in _ACCENTS:
            return self._accented(token)
        if token in _FIGURES:
            self.skip_blanks()
            begin = self.position
            while len(self.peek()) == 1 and self.peek().isalpha():
                self.position += 1
            return self._scripted(None, token + "".join(self.tokens[begin : self.position]))
        if token == "e":
            return self._scripted(E, "e")
        if token in ("i", r"\imath"):
            return self._scripted(I, "i")
        letter = _text_letter(token)
        if letter is not None:
            return self._symbol(letter)
        if token in _GREEK or (len(token) == 1 and token.isalpha()):
            return self._scripted(None, token)
        raise Unreadable(f"{token} has no meaning here")

    def _accented(self, token: str) -> Any:
        if token == r"\overset":
            self.argument()
        argument = self.argument()
        content = "".join(argument).replace(BLANK, "")
        if not content:
            raise Unreadable("an accent without a letter")
        if token in _FONTS and (len(content) > 1 or content.isdigit()):
            return self._read(argument)
        # Bold print does not make another letter, but \\mathbf{i} is a vector, not a number.
        plain = token in _FONTS and content not in ("e", "i")
        return self._scripted(None, content if plain else f"{token}{{{content}}}")

    def _scripted(self, constant: Any, name: str) -> Any:
        """Returns a symbol with its subscript and primes, or the constant without them."""
        plain = name
        while True:
            if self.peek() == "'":
                self.position += 1
                name += "'"
            elif self.peek() == "_":
                self.position += 1
                begin = self.position
                subscript = "".join(self.argument()).replace(BLANK, "").replace(TEXT, "{")
                if self.position == begin:
                    raise Unreadable("a subscript is missing")
                name += f"_{subscript.replace('{', '').replace('}', '')}"
            else:
                break
        if name == plain and constant is not None:
            return self._applied(constant, name, zero_only=True)
        return self._applied(Symbol(name), name)

    def _applied(self, operand: Any, name: str, zero_only: bool = False) -> Any:
        """Returns the symbol `f(0)` where a number alone in brackets follows `f`; else `operand`.

        A product would make f(0) = 0 of every f. After e, i and pi it is a product, as in
        3\\pi(2), unless the number is 0.
        """
        begin = self.position
        self.skip_blanks()
        inner = self.position + 1
        end = next(
            (n for n in range(inner, len(self.tokens)) if self.tokens[n] not in _IN_NUMERAL), inner
        )
        content = trim(self.tokens[inner:end])
        is_number = self.peek() == "(" and list(self.tokens[end : end + 1]) == [")"]
        is_sum = any(
            token in ("+", "-") and content[n - 1 : n] not in ([], ["{"])
            for n, token in enumerate(content)
        )
        argument = read_expression(content) if is_number and not is_sum else None
        if argument is None or ((zero_only or self.as_products) and argument != 0):
            self.position = begin
            return operand
        self.position = end + 1
        return Symbol(f"{name}({argument})")


def function_values(expression: Any) -> list[Any]:
    """Returns the symbols of an expression that stand for values of functions, such as f(0)."""
    return [
        symbol
        for symbol in expression.free_symbols
        if symbol.name.endswith(")") and not symbol.name.startswith((r"\gcd(", r"\lcm("))
    ]


def _read_function(token: str, reader: _Reader) -> Any:
    return reader._function(token)


def _of_integers(name: str, function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Returns the divisor or multiple of integers, and a symbol for other values in any order.

    Of symbols, SymPy gives the divisor of two polynomials, which is 1 for m and n.
    """
    if all(value.is_Integer for value in values):
        return function(values)
    return Symbol(f"{name}({','.join(sorted({str(value) for value in values}))})")


def _read_many(function: Callable[..., Any], reader: _Reader) -> Any:
    return function(*reader._listed())


_RULES: dict[str, Callable[[_Reader], Any]] = {
    r"\frac": _Reader._fraction,
    r"\sqrt": _Reader._root,
    r"\binom": _Reader._binomial,
    "(": lambda reader: reader._enclosed(")"),
    "[": lambda reader: reader._enclosed("]"),
    "|": lambda reader: sympy.Abs(reader._enclosed("|")),
    r"\lfloor": lambda reader: sympy.floor(reader._enclosed(r"\rfloor")),
    r"\lceil": lambda reader: sympy.ceiling(reader._enclosed(r"\rceil")),
    r"\infty": lambda _: oo,
    r"\pi": lambda reader: reader._scripted(pi, r"\pi"),
    **{token: partial(_read_function, token) for token in _FUNCTIONS},
    **{token: partial(_read_many, function) for token, function in _MANY.items()},
}
"""The method that reads an operand, by its first token; other tokens begin symbols or groups."""


def _text_letter(token: str) -> str | None:
    """Returns the letter of a text such as \\text{C}, which is a symbol; None for other tokens."""
    content = token[len(TEXT) : -1] if token.startswith(TEXT) else ""
    return content if len(content) == 1 and content.isalpha() else None


def power(base: Any, exponent: Any) -> Any:
    """Returns base^exponent. Raises `Unreadable` where it would have too many digits."""
    if base.is_Rational and exponent.is_Integer and base not in (0, 1, -1):
        size = max(abs(base.p).bit_length(), base.q.bit_length())
        if abs(exponent) * size > MAX_BITS:
            raise Unreadable("the power has too many digits")
    elif exponent.is_Integer and abs(exponent) > MAX_BITS:
        raise Unreadable("the exponent is too large")
    if base == 0 and (exponent.is_negative or exponent == 0):
        return Integer(1) if exponent == 0 else sympy.zoo
    return Pow(base, exponent)


def factorial(value: Any) -> Any:
    """Returns value!. Raises `Unreadable` where it would have too many digits."""
    if value.is_Integer and value > MAX_FACTORIAL:
        raise Unreadable("the factorial has too many digits")
    return sympy.factorial(value)


def binomial(top: Any, bottom: Any) -> Any:
    """Returns a binomial coefficient. Raises `Unreadable` where it would have too many digits."""
    if any(value.is_Integer and abs(value) > MAX_FACTORIAL for value in (top, bottom)):
        raise Unreadable("the binomial coefficient has too many digits")
    return sympy.binomial(top, bottom)
