r"""Mathematics with a known answer, to which the library math-verify compares responses.

A payload is {"problem": text, "answer": reference answer in LaTeX or plain text}, the columns of
the public datasets in the style of MATH. A list of reference answers holds alternatives, as in
Minerva: a response that equals one of them is correct.

The answer of a response is the content of its last complete \boxed{...}. With `boxed_only: false`,
that of a response without any \boxed is the last expression near its end that math-verify extracts.
math-verify decides equality, and is generous (docs/verifier.md lists the cases), with two
exceptions: an equation that contradicts itself (7 = 42) is incorrect, and a small number does not
equal 0 after rounding.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from bapo_core.tasks.base import Message, Payload, Verdict, VerdictStatus, with_format

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
"""The default instruction to the model."""
MAX_ANSWER = 1_000
"""Most characters of an answer; a longer one is not parsed."""
MAX_DEPTH = 12
"""Most brackets of an answer that are open at a time: parsing 16 takes up to 10 s."""
MAX_TAIL = 1_000
"""Characters at the end of a response without \\boxed that are searched for an answer."""

_BRACES = re.compile(r"\\boxed\s*\{|\\fbox\s*\{|\\.|[{}]", re.DOTALL)
_BLANKS = re.compile(r"\s+")
_DECIMALS = 6
_MARKS = {
    **dict.fromkeys(("\\left", "\\right", "\\$", "\\%", "%"), ""),
    **dict.fromkeys(("\\dfrac", "\\tfrac"), "\\frac"),
}
"""Spellings of LaTeX that `normalise` replaces."""
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        # 1\,000, 1~000 and 1{,}000, of which Math-Verify reads the last alone
        (r"(?<=\d)(?:\\[,;:!]|~|\{,\})(?=\d{3}(?!\d))", ""),
        (r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"°|\^\s*\\circ(?![A-Za-z])|\^\{\s*\\circ\s*\}|\\degree(?![A-Za-z])", ""),
        (r"√\s*(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}"),
        ("[·⋅]", r"\\cdot "),
        ("∞", r"\\infty "),
        ("−", "-"),
        ("²", "^2"),
        ("³", "^3"),
    )
]
"""Spellings of LaTeX and Unicode that Math-Verify does not read, and those that it does."""
_BASE = re.compile(r"[0-9A-Za-z.,]+_(?:\{(\d+)\}|(\d+))")
"""A number with the base of its digits, such as 1011_2, which Math-Verify drops."""
_PUNCTUATION = re.compile(r"(?<!\\)[.,;]+$")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_NUMBER = re.compile(
    r"(-)?(?:([0-9]+(?:\.[0-9]+)?)|([0-9]+)/([0-9]+)|\\frac\{([0-9]+)\}\{([0-9]+)\})"
)
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})")
"""A number such as 4.5e33, as Minerva has them. In LaTeX, its e would be Euler's number."""


@dataclass(frozen=True, slots=True)
class MathTask:
    """Mathematics with an instruction to the model."""

    name: ClassVar[str] = "math"
    columns: ClassVar[Sequence[str]] = ("problem", "answer")
    reward_parts: ClassVar[Sequence[str]] = ("format",)

    instruction: str = INSTRUCTION
    """Text that follows the problem in the user message."""
    boxed_only: bool = True
    r"""Whether an answer must be in a \boxed{...}, as the instruction asks. Set it to false for a
    model that does not follow instructions."""

    def uid(self, payload: Payload) -> str:
        """Returns "math:<hash of the problem>", whatever its white space."""
        problem = _BLANKS.sub(" ", payload["problem"]).strip()
        return f"math:{hashlib.sha256(problem.encode(errors='surrogatepass')).hexdigest()[:16]}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns one user message."""
        return [{"role": "user", "content": f"{payload['problem']}\n\n{self.instruction}"}]

    def warm_up(self) -> None:
        """Imports SymPy and builds the grammar's tables, which takes about a second."""
        self.verify({"answer": "1"}, r"\boxed{\frac{2}{2}}")
        self.verify({"answer": "1"}, "x = 2/2")

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Rewards an answer that equals `payload["answer"]`.

        SymPy may never return, so the caller must set a deadline. math-verify's own deadline uses a
        signal, which works in the main thread only.
        """
        return with_format(self._judge_response(payload, response))

    def _judge_response(self, payload: Payload, response: str) -> Verdict:
        answer = _boxed(response)
        if answer is None:
            return self._verify_plain(payload, response)
        if not answer:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, r"\boxed{} is empty")
        if len(answer) > MAX_ANSWER:
            detail = f"the answer is longer than {MAX_ANSWER} characters"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        if _without_blanks(_bare(answer)) in map(_without_blanks, _reference_answers(payload)):
            return Verdict(1.0, VerdictStatus.OK, answer)
        if _depth(answer) > MAX_DEPTH:
            detail = f"more than {MAX_DEPTH} brackets of the answer are open at a time"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        return _judged(payload, answer, _parse_latex)

    def normalise(self, answer: str) -> str:
        r"""Returns an answer without blanks and marks that carry no meaning, for majority votes.

        Numbers become reduced fractions, so that 0.5, \dfrac{2}{4} and 1/2 are one answer.
        Other answers are equal if their texts are.
        """
        text = _without_blanks(_respelled(_bare(answer)))
        for mark, plain in _MARKS.items():
            text = text.replace(mark, plain)
        if _THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        number = _NUMBER.fullmatch(text)
        if number is None:
            return text
        sign, decimal, *ratio = number.groups()
        numerator, denominator = ratio[:2] if ratio[0] else ratio[2:]
        if decimal is None and not int(denominator):
            return text
        value = Fraction(decimal) if decimal else Fraction(int(numerator), int(denominator))
        return str(-value if sign else value)

    def _verify_plain(self, payload: Payload, response: str) -> Verdict:
        # An unclosed \boxed is an answer that was cut off, not an answer elsewhere.
        if self.boxed_only or r"\boxed" in response:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, r"no complete \boxed{...}")
        tail = response[-MAX_TAIL:].strip()
        if not tail:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        verdict = _judged(payload, tail, _parse_text)
        if verdict.status == VerdictStatus.PARSE_ERROR:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        return verdict

    def parse_row(self, row: Mapping[str, Any]) -> Payload | None:
        """Returns the problem of a row, or None for one whose answer is null or empty.

        Raises `ValueError` unless the problem is text, and the answer text, a number or a list of
        those.
        """
        problem, answer = row["problem"], row["answer"]
        if not isinstance(problem, str) or not problem.strip():
            raise ValueError(f"problem is {problem!r:.80}; make it the text of a problem")
        if not isinstance(answer, list):
            text = _answer_text(answer)
            return {"problem": problem, "answer": text} if text.strip() else None
        answers = [text for text in (_answer_text(item).strip() for item in answer) if text]
        if not answers:
            return None
        return {"problem": problem, "answer": answers[0] if len(answers) == 1 else answers}


def _answer_text(answer: Any) -> str:
    """Returns a reference answer as text, which is empty for null."""
    if answer is None:
        return ""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(answer)
    if not isinstance(answer, str):
        raise ValueError(f"answer is {answer!r:.80}; make it text, a number or a list of those")
    return answer


def _boxed(response: str) -> str | None:
    r"""Returns the content of the last \boxed{...} that closes, in linear time."""
    content: tuple[int, int] | None = None
    open_braces: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(response):
        token = match.group()
        if token == "}":
            if open_braces:
                is_box, start = open_braces.pop()
                if is_box:
                    content = start, match.start()
        elif token.endswith("{") and token != r"\{":
            open_braces.append((token != "{", match.end()))
    return None if content is None else response[slice(*content)].strip()


def _reference_answers(payload: Payload) -> list[str]:
    """Returns the reference answers, one of which an answer must equal."""
    answers = payload["answer"]
    return [_bare(str(answer)) for answer in (answers if isinstance(answers, list) else [answers])]


def _bare(answer: str) -> str:
    """Returns an answer without \\boxed, dollar signs and a final punctuation mark."""
    boxed = _boxed(answer)
    text = (answer if boxed is None else boxed).strip()
    return _PUNCTUATION.sub("", text).strip("$").strip()


def _respelled(text: str) -> str:
    """Returns an answer in the spelling that Math-Verify reads, without degree signs."""
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    return text


def _depth(text: str) -> int:
    """Returns how many brackets of any kind are open at a time."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _without_blanks(text: str) -> str:
    return _BLANKS.sub("", text)


# ---- math-verify, imported at first use, because `bapo_core` must import without it --------------


def _parse_latex(text: str) -> list[Any]:
    """Parses LaTeX without any text around it; returns [] if it has no meaning."""
    from math_verify import LatexExtractionConfig

    text = _respelled(_bare(text))
    number = _SCIENTIFIC.fullmatch(text)
    if number is not None:
        text = rf"{number[1]} \times 10^{{{number[2]}}}"
    return _parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)])


def _parse_text(text: str) -> list[Any]:
    """Parses the last answer of a text; returns [] if there is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return _parse(text, [LatexExtractionConfig(), ExprExtractionConfig()])


def _parse(text: str, configs: Sequence[Any]) -> list[Any]:
    from math_verify import parse

    # Without this, it warns in every process that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expressions: list[Any] = parse(
        text, configs, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    return expressions


def _equal(gold: Any, answer: Any, decimals: int = _DECIMALS) -> bool:
    from math_verify import verify

    return bool(
        verify(gold, answer, float_rounding=decimals, timeout_seconds=None, raise_on_error=True)
    )


# The G responses to a prompt share a reference answer, and prompts recur.
@lru_cache(maxsize=1024)
def _parsed_gold(text: str) -> tuple[list[Any], int]:
    """Returns (parsed reference answer, decimals to which floats are compared)."""
    gold = _parse_latex(text) or _parse_text(text)
    try:
        size = abs(float(gold[0])) if gold else 0.0
    except (TypeError, ValueError, OverflowError):
        return gold, _DECIMALS  # not a number, or beyond the range of floats
    # math-verify rounds to 6 decimals: 10^-7 would equal 0.
    small = 0 < size < 1
    return gold, _DECIMALS + (math.floor(-math.log10(size)) if small else 0)


def _judged(payload: Payload, answer: str, parse: Callable[[str], list[Any]]) -> Verdict:
    """Returns the verdict on an answer: right if it equals one of the reference answers."""
    references = _reference_answers(payload)
    try:
        expressions = parse(answer)
        if not expressions:
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, "not mathematics")
        consistent = not _contradicts(expressions[0])
        equal = consistent and any(_matches(text, answer, expressions) for text in references)
    except MemoryError:
        raise  # the process may be unusable, and the verifier must replace it
    except Exception as error:  # noqa: BLE001
        # ANTLR, latex2sympy and SymPy raise exceptions of many kinds on odd input (TypeError,
        # KeyError, RecursionError, NotImplementedError, ...). Each means that there is no value to
        # compare, and a response must not be able to raise in our callers.
        return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, type(error).__name__)
    if not equal:
        return Verdict(0.0, VerdictStatus.WRONG_VALUE, answer, f"does not equal {references[-1]}")
    return Verdict(1.0, VerdictStatus.OK, answer)


def _matches(reference: str, answer: str, expressions: list[Any]) -> bool:
    """Whether an answer, parsed into `expressions`, equals a reference answer."""
    bases = {_base(reference), _base(answer)} - {None}
    gold, decimals = _parsed_gold(reference)
    return len(bases) < 2 and bool(gold) and _equal(gold, expressions, decimals)


def _base(answer: str) -> str | None:
    """Returns the base that an answer names; None without one."""
    match = _BASE.fullmatch(_without_blanks(_bare(answer)))
    return None if match is None else match[1] or match[2]


def _contradicts(expression: Any) -> bool:
    """Whether `expression` equates two numbers that differ, as 7 = 42 and 7 = x = 42 do.

    math-verify compares the last right-hand side only.
    """
    from sympy import And, Eq

    parts: Sequence[Any] = (expression,)
    if not isinstance(expression, Eq):
        parts = getattr(expression, "_unsorted_args", ())
    equations = [part for part in parts if isinstance(part, Eq)]
    numbers = [
        [side for side in (equation.lhs, equation.rhs) if not side.free_symbols]
        for equation in equations
    ]
    if isinstance(expression, And):  # a chain of equations
        numbers = [[number for sides in numbers for number in sides]]
    return any(
        not _equal(first, second) for first, *others in filter(None, numbers) for second in others
    )
