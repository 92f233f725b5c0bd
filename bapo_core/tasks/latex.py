r"""Splits LaTeX into tokens and brings the tokens of an answer into one spelling.

A token is a command (`\frac`), an escaped character (`\\`, `\,`, `\{`), one other character, or a
text such as `\text{cm}` with its braces. No rewriting crosses tokens, so the row separator `\\`
is never mistaken for the blank `\ `.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from bapo_core.tasks.units import CURRENCIES, is_unit

BLANK = " "
"""The token of every kind of space."""
DEGREE = r"\degree"
TEXT = r"\text{"
"""The beginning of a token that holds the words of a \\text{...}."""
OPENING = frozenset(("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"))
CLOSING = frozenset((")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"))

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎"
_RAISED = re.compile(f"([{_SUPERSCRIPTS}]+)|([{_SUBSCRIPTS}]+)")
_VULGAR = re.compile(r"([0-9]+)⁄([0-9]+)")
_UNICODE = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **dict.fromkeys("·⋅∙•∗", r"\cdot "),
    **dict.fromkeys("⟨〈", r"\langle "),
    **dict.fromkeys("⟩〉", r"\rangle "),
    **dict.fromkeys("°˚º", r"^\circ "),
    **dict.fromkeys("∣∥", "|"),
    **dict.fromkeys("。．", "."),
    **dict.fromkeys("，、", ","),
    **dict.fromkeys("′’ʹ", "'"),
    **dict.fromkeys("“”„", ""),
    "×": r"\times ",
    "÷": "/",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "ℏ": r"\hbar ",
    "ℓ": r"\ell ",
    "∠": r"\angle ",
    "△": r"\triangle ",
    **{
        chr(unicodedata_point): rf"\{name} "
        for name, unicodedata_point in (
            *zip(
                [
                    "alpha",
                    "beta",
                    "gamma",
                    "delta",
                    "epsilon",
                    "zeta",
                    "eta",
                    "theta",
                    "iota",
                    "kappa",
                    "lambda",
                    "mu",
                    "nu",
                    "xi",
                ],
                range(0x3B1, 0x3BF),
                strict=True,
            ),
            ("pi", 0x3C0),
            ("rho", 0x3C1),
            ("sigma", 0x3C3),
            ("tau", 0x3C4),
            ("upsilon", 0x3C5),
            ("phi", 0x3C6),
            ("chi", 0x3C7),
            ("psi", 0x3C8),
            ("omega", 0x3C9),
            ("Gamma", 0x393),
            ("Delta", 0x394),
            ("Theta", 0x398),
            ("Lambda", 0x39B),
            ("Xi", 0x39E),
            ("Pi", 0x3A0),
            ("Sigma", 0x3A3),
            ("Phi", 0x3A6),
            ("Psi", 0x3A8),
            ("Omega", 0x3A9),
            ("phi", 0x3D5),
            ("theta", 0x3D1),
            ("epsilon", 0x3F5),
        )
    },
}
_TRANSLATION = str.maketrans(_UNICODE)

_DROPPED = frozenset(
    [
        r"\left",
        r"\right",
        r"\middle",
        r"\big",
        r"\Big",
        r"\bigg",
        r"\Bigg",
        r"\bigl",
        r"\bigr",
        r"\Bigl",
        r"\Bigr",
        r"\biggl",
        r"\biggr",
        r"\Biggl",
        r"\Biggr",
        r"\displaystyle",
        r"\textstyle",
        r"\scriptstyle",
        r"\limits",
        r"\nolimits",
        r"\mathstrut",
        r"\strut",
        r"\rm",
        r"\bf",
        r"\it",
        r"\sf",
        r"\tt",
        r"\boldmath",
        r"\null",
        r"\relax",
        r"$",
        r"\(",
        r"\)",
        r"\[",
        r"\]",
        r"\!",
        r"\/",
        r"\negthinspace",
        r"\centering",
    ]
)
_BLANKS = frozenset(
    (
        "\\",
        r"\,",
        r"\:",
        r"\;",
        r"\>",
        r"\ ",
        "~",
        "\\\n",
        r"\quad",
        r"\qquad",
        r"\enspace",
        r"\thinspace",
    )
    + (r"\medspace", r"\thickspace", r"\nobreakspace", r"\space")
)
_SKIPPED_WITH_ARGUMENT = frozenset((r"\hspace", r"\vspace", r"\phantom", r"\hphantom", r"\label"))
_RENAMED = {
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
    **dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom"),
    **dict.fromkeys((r"\leq", r"\leqslant", r"\leqq"), r"\le"),
    **dict.fromkeys((r"\geq", r"\geqslant", r"\geqq"), r"\ge"),
    **dict.fromkeys((r"\times", r"\ast", r"\cdotp", r"\bullet", "*"), r"\cdot"),
    **dict.fromkeys((r"\vert", r"\lvert", r"\rvert", r"\mid", r"\|"), "|"),
    **dict.fromkeys((r"\backslash", r"\smallsetminus"), r"\setminus"),
    r"\neq": r"\ne",
    r"\lt": "<",
    r"\gt": ">",
    r"\div": "/",
    "⁄": "/",
    r"\varnothing": r"\emptyset",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\lparen": "(",
    r"\rparen": ")",
    r"\%": "%",
    r"\varphi": r"\phi",
    r"\varepsilon": r"\epsilon",
    r"\vartheta": r"\theta",
    r"\prime": "'",
    r"\infin": r"\infty",
    r"\colon": ":",
    r"\cr": r"\\",
    r"\land": ",",
    r"\lor": ",",
    r"\vee": ",",
    r"\wedge": ",",
    r"\bigcup": r"\cup",
    r"\bigcap": r"\cap",
    r"\And": ",",
}
_TEXTS = frozenset(
    [
        r"\text",
        r"\mbox",
        r"\textrm",
        r"\textbf",
        r"\textit",
        r"\textsf",
        r"\textup",
        r"\textnormal",
        r"\texttt",
        r"\emph",
        r"\mathrm",
        r"\operatorname",
        r"\hbox",
        r"\mathop",
        r"\underline",
        r"\mathsf",
        r"\mathtt",
    ]
)
_INFIX = {r"\over": r"\frac", r"\choose": r"\binom"}
_TIME = re.compile(r"(?<=:[0-9]{2})\s*([AaPp])\.?\s?[Mm](?![A-Za-z])\.?")
"""The half of the day of a time such as 7:30 pm."""
_MEASURE = re.compile(r"([-+]?[0-9][0-9.,]*) ([A-Za-z][A-Za-z/^0-9 ]*)")
"""A number with words, which may be its unit."""
_BOXES = frozenset((r"\boxed", r"\fbox"))
_CONNECTORS = frozenset(("and", "or", ",", ";", ", and", ", or", "and/or"))
_FUNCTION_WORDS = "sin cos tan cot csc log ln lg exp arcsin arccos arctan sinh cosh tanh sqrt"
_WORDS = frozenset(f"{_FUNCTION_WORDS} pi infty alpha beta theta lambda omega".split())
"""Words that mean the command of the same name, also without a backslash."""
_NUMBER_OR_SYMBOL = re.compile(r"[-+]?[0-9][0-9.,/ ]*|\([A-Za-z]\)|[-+]")
_OPERATORS = frozenset(("gcd", "lcm", "max", "min", "sec"))
"""Names that mean a command in \\operatorname{...} alone: `9 min` and `9 sec` are times."""


def canonical_unicode(text: str) -> str:
    """Returns a text in NFKC, with LaTeX for the symbols that NFKC would flatten or leave.

    `x²` becomes `x^{2}` and `3½` becomes `3 \\frac{1}{2}`, where NFKC alone gives `x2` and `31⁄2`.
    """
    if text.isascii():
        return text
    text = _RAISED.sub(_script, text)
    pieces = []
    for character in text:
        plain = unicodedata.normalize("NFKC", character)
        fraction = _VULGAR.fullmatch(plain)
        if fraction is not None:
            plain = rf" \frac{{{fraction[1]}}}{{{fraction[2]}}}"
        elif unicodedata.category(character) == "Cf":
            plain = " "  # an invisible mark, which joins no digits
        pieces.append(plain if character not in _UNICODE else character)
    return "".join(pieces).translate(_TRANSLATION)


def _script(match: re.Match[str]) -> str:
    mark = "^" if match[1] else "_"
    return f"{mark}{{{unicodedata.normalize('NFKC', match[0]).replace('−', '-')}}}"


def split_tokens(text: str) -> list[str]:
    """Returns the tokens of a text, which joined give the text."""
    return _TOKEN.findall(text)


def normalise_tokens(text: str) -> list[str]:
    """Returns an answer's tokens in one spelling, without size and style commands."""
    text = canonical_unicode(text)
    if r"\begin" not in text:
        # A row separator means nothing outside an environment: it is a doubled backslash.
        text = text.replace(r"\\", "\\")
    text = _TIME.sub(lambda time: rf" \text{{{time[1].lower()}.m}}", text)
    tokens = split_tokens(text)
    if tokens.count("$") == 1:  # Mathematics has two of them around it.
        tokens[tokens.index("$")] = r"\$"
    tokens = _infixed(list(_spelled(tokens)))
    return trim(_merge_words(_mark_degrees(tokens)))


def _spelled(tokens: Sequence[str]) -> Iterator[str]:
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token.isspace() or token in _BLANKS:
            yield BLANK
        elif token in _DROPPED:
            if token == r"\!":
                yield token
            if (
                token in (r"\left", r"\right")
                and position < len(tokens)
                and tokens[position] == "."
            ):
                position += 1
        elif token in _SKIPPED_WITH_ARGUMENT:
            _, position = _argument(tokens, position)
            yield BLANK
        elif token in _BOXES:
            content, position = _argument(tokens, position)
            yield from _spelled(content)
        elif token in _TEXTS:
            content, position = _argument(tokens, position)
            yield from _text_tokens("".join(content), token)
        elif token == "√":
            content, position = _radicand(tokens, position)
            yield from (r"\sqrt", "{", *_spelled(content), "}")
        else:
            yield _RENAMED.get(token, token)


def _infixed(tokens: list[str]) -> list[str]:
    """Writes `{a \\over b}` as `\\frac{a}{b}`, and `{n \\choose k}` as `\\binom{n}{k}`.

    The operands end where a group, a bracket or a cell of a matrix does.
    """
    while True:
        position = next((n for n, token in enumerate(tokens) if token in _INFIX), None)
        if position is None:
            return tokens
        begin = position - sum(1 for _ in _operand(tokens[:position][::-1], CLOSING, OPENING))
        end = position + 1 + sum(1 for _ in _operand(tokens[position + 1 :], OPENING, CLOSING))
        if tokens[max(0, begin - 1) : begin] == [r"\begin"]:
            begin += _header_length(tokens[begin:position])
        operands = tokens[begin:position], tokens[position + 1 : end]
        command = _INFIX[tokens[position]]
        in_group = tokens[max(0, begin - 1) : begin] == ["{"]
        if in_group and "".join(tokens[: begin - 1]).rstrip()[-1:].isdigit():
            begin, end = begin - 1, end + 1  # 1{1 \\over 2} is the mixed number 1\\frac{1}{2}.
        tokens = [
            *tokens[:begin],
            *(command, "{", *operands[0], "}", "{", *operands[1], "}"),
            *tokens[end:],
        ]


def _operand(
    tokens: Sequence[str], opening: AbstractSet[str], closing: AbstractSet[str]
) -> Iterator[str]:
    """Yields the tokens up to the end of a group, a bracket or a cell that began before them."""
    depth = 0
    for token in tokens:
        depth += (token in opening) - (token in closing)
        if depth < 0 or (depth == 0 and token in ("&", r"\\")):
            return
        yield token


def _header_length(tokens: Sequence[str]) -> int:
    """Returns how many tokens the name of an environment has, with the columns of an array."""
    length = 0
    for _ in range(2 if list(tokens[:7]) == list("{array}") else 1):
        end = matching(tokens, length) if list(tokens[length : length + 1]) == ["{"] else None
        length = length if end is None else end + 1
    return length


def _radicand(tokens: Sequence[str], position: int) -> tuple[Sequence[str], int]:
    """Returns what a root sign without LaTeX covers: a numeral, a bracket or one token."""
    end = position
    while end < len(tokens) and (tokens[end].isdigit() or (end > position and tokens[end] == ".")):
        end += 1
    if end > position or tokens[position : position + 1] != ["("]:
        return (tokens[position:end], end) if end > position else _argument(tokens, position)
    depth = 0
    for end in range(position, len(tokens)):
        depth += (tokens[end] == "(") - (tokens[end] == ")")
        if depth == 0:
            break
    return tokens[position + 1 : end], end + 1


def _argument(tokens: Sequence[str], position: int) -> tuple[Sequence[str], int]:
    """Returns the tokens of a command's argument, without its braces, and the position after it."""
    while position < len(tokens) and tokens[position].isspace():
        position += 1
    if position == len(tokens):
        return (), position
    if tokens[position] != "{":
        return tokens[position : position + 1], position + 1
    end = matching(tokens, position)
    if end is None:
        return tokens[position + 1 :], len(tokens)
    return tokens[position + 1 : end], end + 1


def matching(tokens: Sequence[str], position: int) -> int | None:
    """Returns the position of the brace that closes the one at `position`; None without one."""
    depth = 0
    for index in range(position, len(tokens)):
        if tokens[index] == "{":
            depth += 1
        elif tokens[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    return None


def _text_tokens(content: str, command: str) -> Iterator[str]:
    """Yields the tokens of a \\text{...}: a comma for "and", mathematics, or the words."""
    words = " ".join(content.replace("$", "").replace("~", " ").split()).rstrip(".")
    if words.lower().strip() in _CONNECTORS:
        yield ","
    elif not words:
        yield BLANK
    elif words in _WORDS or (words in _OPERATORS and command == r"\operatorname"):
        yield f"\\{words}"
    elif _NUMBER_OR_SYMBOL.fullmatch(words) or "\\" in words:
        yield from _spelled(split_tokens(words))
    elif (measure := _MEASURE.fullmatch(words)) is not None and is_unit(measure[2]):
        yield from (*measure[1], BLANK, f"{TEXT}{measure[2]}}}")
    else:
        yield f"{TEXT}{words}}}"


def _mark_degrees(tokens: Sequence[str]) -> list[str]:
    """Replaces `^\\circ` and `^{\\circ}` by one token, and `^{\\prime}` by a prime."""
    marked: list[str] = []
    position = 0
    while position < len(tokens):
        if tokens[position] == "^":
            rest = [token for token in tokens[position + 1 : position + 8] if token != BLANK]
            if rest[:1] in ([r"\circ"], [DEGREE]):
                position = tokens.index(rest[0], position) + 1
                marked.append(DEGREE)
                continue
            if rest[:3] in (["{", r"\circ", "}"], ["{", DEGREE, "}"]):
                position = tokens.index("}", position) + 1
                marked.append(DEGREE)
                continue
            if rest[:2] == ["{", "'"]:
                end = tokens.index("'", position)
                while end < len(tokens) and tokens[end] in ("'", BLANK):
                    end += 1
                if tokens[end : end + 1] == ["}"]:
                    marked.extend("'" for token in tokens[position:end] if token == "'")
                    position = end + 1
                    continue
        marked.append(tokens[position])
        position += 1
    return marked


def _merge_words(tokens: Sequence[str]) -> list[str]:
    """Replaces plain words: "and" and "or" by a comma, "sqrt" and its kind by their commands."""
    merged: list[str] = []
    position = 0
    while position < len(tokens):
        end = position
        while end < len(tokens) and len(tokens[end]) == 1 and tokens[end].isalpha():
            end += 1
        word = "".join(tokens[position:end])
        if end == position:
            merged.append(tokens[position])
            position += 1
            continue
        if word.lower() in ("and", "or") and merged and end < len(tokens):
            merged.append(",")
        elif word in _WORDS and not (merged and merged[-1] == "_"):
            merged.append(f"\\{word}")
        else:
            merged.extend(tokens[position:end])
        position = end
    return merged


def trim(tokens: Sequence[str]) -> list[str]:
    """Removes blanks and punctuation at the ends, marks of emphasis, and repeated blanks."""
    trimmed = list(tokens)
    changed = True
    while changed and trimmed:
        changed = False
        while trimmed and trimmed[-1] in (BLANK, ".", ",", ";", "`", "~", r"\!", r"\\"):
            trimmed.pop()
            changed = True
        while trimmed and trimmed[0] in (BLANK, "`", ":", r"\!"):
            trimmed.pop(0)
            changed = True
        for mark in (r"\cdot", "_"):  # `**73**`, whose asterisks are \cdot by now
            if len(trimmed) > 4 and trimmed[:2] == [mark] * 2 and trimmed[-2:] == [mark] * 2:
                trimmed = trimmed[2:-2]
                changed = True
            if len(trimmed) > 2 and trimmed[0] == mark == trimmed[-1]:
                trimmed = trimmed[1:-1]
                changed = True
        if trimmed[:1] == ["{"] and matching(trimmed, 0) == len(trimmed) - 1:
            trimmed = trimmed[1:-1]
            changed = True
    return [
        token
        for index, token in enumerate(trimmed)
        if token != BLANK or trimmed[index - 1] != BLANK
    ]


def characters(tokens: Sequence[str], braces: bool = False) -> str:
    """Returns the characters of tokens, by which equal answers are equal whatever they mean.

    Blanks count between two digits only, and the braces of single tokens only with `braces`.
    """
    kept = [token for token in tokens if token != r"\!" and token not in CURRENCIES]
    pieces: list[str] = []
    for index, token in enumerate(kept):
        if token == BLANK:
            if _is_digit(kept, index - 1) and _is_digit(kept, index + 1):
                pieces.append(BLANK)
        elif token.startswith(TEXT):
            pieces.append("".join(token[len(TEXT) : -1].split()))
        else:
            pieces.append(token)
    if braces:
        return "".join(pieces)
    single: list[str] = []
    index = 0
    while index < len(pieces):
        if pieces[index] == "{" and pieces[index + 2 : index + 3] == ["}"]:
            single.append(pieces[index + 1])
            index += 3
        else:
            single.append(pieces[index])
            index += 1
    return "".join(single)


def _is_digit(tokens: Sequence[str], index: int) -> bool:
    return 0 <= index < len(tokens) and len(tokens[index]) == 1 and tokens[index].isdigit()
