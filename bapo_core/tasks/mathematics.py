r"""Mathematics with a known answer, to which responses are compared.

A payload is {"problem": text, "answer": reference answer in LaTeX or plain text}, the columns of
the public datasets in the style of MATH. A list of reference answers holds alternatives, as in
Minerva: a response that equals one of them is correct. Of a worked solution, the reference is the
final answer: the rest of the line after the last `####`, as in GSM8K, or what is in its
\boxed{...}, as in MATH.

The answer of a response is the content of its last complete \boxed{...}. With `boxed_only: false`,
the answer of a response whose boxes are all empty, or that has none, is the last expression near
its end that math-verify extracts. Two answers are equal if they have the same characters, or the
same structure with equal parts, or the same value (`math_answers`, `math_equality`);
docs/verifier.md lists where this is generous. A reference answer is read as a whole, or compared as
text.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar

from bapo_core.tasks.base import Message, Payload, Verdict, VerdictStatus, with_format
from bapo_core.tasks.latex import DEGREE, TEXT, characters, normalise_tokens
from bapo_core.tasks.units import CURRENCIES

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
"""The default instruction to the model."""
MAX_ANSWER = 1_000
"""Most characters of an answer; a longer one is not parsed."""
MAX_DEPTH = 12
"""Most brackets of an answer that are open at a time: parsing 16 takes up to 10 s."""
MAX_TAIL = 1_000
"""Characters at the end of a response without \\boxed that are searched for an answer."""

_BRACES = re.compile(
    r"\\(?:boxed|fbox)\s*(?:\{|(-?[0-9][0-9.,]*[0-9]|[0-9]|[A-Za-z](?![A-Za-z])))|\\.|[{}]",
    re.DOTALL,
)
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_WHITE = " \t\r\n"
_SOLUTION_MARK = "####"
"""Mark before the final answer of a worked solution (GSM8K, arXiv 2110.14168)."""
_BLANKS = re.compile(r"\s+")
_MATHEMATICS = re.compile(r"[\\0-9^_{}=+]")
"""Characters of what is no mere word."""
_COMMANDS = re.compile(
    r"\\(?:text|textbf|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\."
)
"""LaTeX commands, with the text or the name that one of them has."""
_WORD = re.compile(
    r"(?<![A-Za-z0-9^_{])(?![A-Z]+\b)"
    r"(?:[A-Za-z]*[AEIOUYaeiouy][A-Za-z]*(?<=[A-Za-z]{3})|to|by|in|of|at|is)"
    r"(?![A-Za-z0-9^_}(])|\b[A-Za-z]:(?=\s)"
)
"""A word or a label such as `A: `, rather than a product such as `2xy` or the points `ABC`."""
_NUMBER = re.compile(r"[0-9][0-9.,]*")
_EXPONENT = re.compile(r"(?:\\(?:times|cdot)\s*10\s*)?\^\s*(?:\{\s*[-+]?[0-9]+\s*\}|[-+]?[0-9]+)")
"""An exponent, or a power of ten behind a number: they are no numbers of their own."""
_MATHEMATICAL_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        "and or sin cos tan cot sec csc arcsin arccos arctan exp log sqrt mod max min gcd lcm",
    )
)
"""Words that structures and functions are written with."""
_NUMERIC = re.compile(r"[-+0-9.,/ {}]*(?:\\frac[-0-9{}]+)?")
"""Characters of a number, which may be a fraction or a mixed number."""


@dataclass(frozen=True, slots=True)
class MathTask:
    """Mathematics with an instruction to the model."""

    name: ClassVar[str] = "math"
    columns: ClassVar[Sequence[str]] = ("problem", "answer")
    reward_parts: ClassVar[Sequence[str]] = ("format",)

    instruction: str = INSTRUCTION
    """Text that follows the problem in the user message."""
    system: str = ""
    """The system message before it; without one, the chat template has its own or none."""
    boxed_only: bool = True
    r"""Whether an answer must be in a \boxed{...}, as the instruction asks. Set it to false for a
    model that does not follow instructions."""
    ordered: bool = False
    """Whether the order of a list without brackets (`1, 2`) matters. The order of a pair always
    does, and the order of a set never."""

    def uid(self, payload: Payload) -> str:
        """Returns "math:<hash of the problem>", whatever its white space."""
        problem = _BLANKS.sub(" ", payload["problem"]).strip()
        return f"math:{hashlib.sha256(problem.encode(errors='surrogatepass')).hexdigest()[:16]}"

    def render(self, payload: Payload) -> list[Message]:
        """Returns one user message, after the system message if there is one."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [
            *system,
            {"role": "user", "content": f"{payload['problem']}\n\n{self.instruction}"},
        ]

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
        if answer is None or not (answer or self.boxed_only):
            return self._verify_plain(payload, response)
        if not answer:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, r"\boxed{} is empty")
        if len(answer) > MAX_ANSWER:
            detail = f"the answer is longer than {MAX_ANSWER} characters"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        tokens = normalise_tokens(answer)
        if any(has_same_characters(tokens, text) for text in _reference_answers(payload)):
            return Verdict(1.0, VerdictStatus.OK, answer)
        if _depth(answer) > MAX_DEPTH:
            detail = f"more than {MAX_DEPTH} brackets of the answer are open at a time"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        return self._compare(payload, answer)

    def normalise(self, answer: str) -> str:
        r"""Returns an answer without blanks and marks that carry no meaning, for majority votes.

        Numbers become reduced fractions, so that 0.5, \dfrac{2}{4} and 1/2 are one answer.
        Other answers are equal if their texts are.
        """
        from bapo_core.tasks.math_answers import Value, as_fraction

        tokens = normalise_tokens(answer)
        text = characters([token for token in tokens if token not in ("%", DEGREE)], braces=True)
        if len(answer) > MAX_ANSWER or not _NUMERIC.fullmatch(text):
            return text
        value = _read(answer)[0]
        number = as_fraction(value) if isinstance(value, Value) else None
        return text if number is None else str(number)

    def _verify_plain(self, payload: Payload, response: str) -> Verdict:
        # An empty \boxed repeats the instruction. An unclosed one is an answer that was cut off,
        # not an answer elsewhere.
        plain = _EMPTY_BOX.sub(" ", response)
        if self.boxed_only or r"\boxed" in plain:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, r"no complete \boxed{...}")
        tail = plain[-MAX_TAIL:].strip()
        if not tail:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        answer = _last_answer(tail)
        if answer is None:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        return self._compare(payload, answer)

    def _compare(self, payload: Payload, answer: str) -> Verdict:
        """Returns the verdict on an answer: right if it equals one of the reference answers."""
        from bapo_core.tasks.math_answers import Words
        from bapo_core.tasks.math_equality import equals

        references = _reference_answers(payload)
        try:
            readings = _read(answer)
            equal = any(
                equals(gold, reading, self.ordered)
                for text in references
                for gold in _read_gold(text)
                for reading in readings
            )
        except MemoryError:
            raise  # the process may be unusable, and the verifier must replace it
        except Exception as error:  # noqa: BLE001
            # SymPy raises exceptions of many kinds on odd input (TypeError, RecursionError,
            # NotImplementedError, ...). Each means that there is no value to compare, and a
            # response must not be able to raise in our callers.
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, type(error).__name__)
        if equal:
            return Verdict(1.0, VerdictStatus.OK, answer)
        if isinstance(readings[0], Words) and not readings[0].text.isalpha():
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, "not mathematics")
        detail = f"does not equal {references[-1]}"
        return Verdict(0.0, VerdictStatus.WRONG_VALUE, answer, detail)

    def explain_reference(self, payload: Payload) -> str | None:
        """Returns why a reference answer is not one answer that can be read; None if it is.

        A reference that cannot be read as mathematics equals nothing but its own characters. One
        that may be read in several ways refuses the result that its author means.
        """
        from bapo_core.tasks.math_answers import is_arithmetic, unread_parts

        for text in _reference_answers(payload):
            shown = f"{_BLANKS.sub(' ', text):.80}"
            if len(set(_boxes(text))) > 1:
                return f"{shown} has several \\boxed{{...}} with different answers"
            try:
                reading = _read(text)[0]
                unread = list(unread_parts(reading))
            except Exception as error:  # noqa: BLE001 - as in `_compare`
                return f"{shown} cannot be read as mathematics: {type(error).__name__}"
            # Words, such as `\\text{even}`, need no reading.
            if any(map(_MATHEMATICS.search, unread)):
                return f"{shown} cannot be read as mathematics"
            if is_arithmetic(reading):
                return f"{shown} is an equation of numbers; keep only its result"
            if _has_numbers_among_words(text, reading):
                return f"{shown} has several numbers among words; keep only the answer"
        return None

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
    if isinstance(answer, Decimal) and answer.is_finite():
        return f"{answer:f}"
    if not isinstance(answer, str):
        raise ValueError(f"answer is {answer!r:.80}; make it text, a number or a list of those")
    return _final_answer(answer)


def _boxed(response: str) -> str | None:
    r"""Returns the content of the last \boxed{...} that closes, in linear time.

    An empty box counts only without another one. `\boxed 42` is TeX for a box of one token; people
    who write it mean the number.
    """
    content: str | None = None
    for found in _boxes(response):
        content = found or content or ""
    return content


def _boxes(text: str) -> Iterator[str]:
    r"""Yields the content of each \boxed{...} that closes, in the order in which they close."""
    open_braces: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        found: str | None = None
        if token == "}":
            if open_braces:
                is_box, start = open_braces.pop()
                found = text[start : match.start()].strip(_WHITE) if is_box else None
        elif match[1]:
            found = match[1]
        elif token.endswith("{") and token != r"\{":
            open_braces.append((token != "{", match.end()))
        if found is not None:
            yield found


def _final_answer(text: str) -> str:
    r"""Returns the final answer of a worked solution; other references as they are.

    It is the rest of the line after the last mark `####`, or what is in \boxed{...}. Several boxes
    with different contents leave open which is the answer, so such a text is returned as it is.
    """
    _, mark, marked = text.rpartition(_SOLUTION_MARK)
    if mark:
        return next(iter(marked.strip().splitlines()), "").strip()
    boxes = set(filter(None, _boxes(text)))
    return boxes.pop() if len(boxes) == 1 else text


def _reference_answers(payload: Payload) -> list[str]:
    """Returns the reference answers, one of which an answer must equal."""
    answers = payload["answer"]
    return [str(answer) for answer in (answers if isinstance(answers, list) else [answers])]


def _has_numbers_among_words(text: str, reading: Any) -> bool:
    """Returns whether a reference has several numbers, and words that are no units.

    reading: what the reference was read as, in which words may have become products of letters.
    """
    from bapo_core.tasks.math_answers import units_of

    plain = _COMMANDS.sub(" ", _EXPONENT.sub("^", text))
    if len(_NUMBER.findall(plain)) < 2:
        return False
    known = {word.casefold() for unit in units_of(reading) for word in unit.split()}
    words = {word.casefold() for word in _WORD.findall(plain)}
    return not words <= known | _MATHEMATICAL_WORDS


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


def has_same_characters(tokens: Sequence[str], reference: str) -> bool:
    """Returns whether an answer's normalised tokens have the characters of a reference answer."""
    text, (gold, currencies) = characters(tokens), _gold_characters(reference)
    if currencies and not currencies >= CURRENCIES.keys() & tokens:
        return False  # €5 is not $5, but 5 is.
    is_word = len(text) > 2 or (len(text) == 2 and TEXT in reference)
    if is_word and text.isalpha() and text.casefold() == gold.casefold():
        return True  # words, whose case has no meaning
    return bool(text) and text == gold


# The G responses to a prompt share a reference answer, and prompts recur.
@lru_cache(maxsize=1024)
def _gold_characters(text: str) -> tuple[str, AbstractSet[str]]:
    """Returns the characters of a reference answer, and the signs of its currencies."""
    tokens = normalise_tokens(text)
    return characters(tokens), CURRENCIES.keys() & tokens


# ---- SymPy and Math-Verify, imported at first use: `bapo_core` must import without them ----------


def _read(text: str) -> list[Any]:
    """Returns the readings of an answer (`math_answers.read_answer`)."""
    from bapo_core.tasks.math_answers import read_answer

    return read_answer(normalise_tokens(text))


_read_gold = lru_cache(maxsize=1024)(_read)


def _last_answer(text: str) -> str | None:
    """Returns the last answer in a text without a box, as Math-Verify finds it; None without one.

    The whole text is the answer if it can be read.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    from bapo_core.tasks.math_answers import unread_parts

    # Without this, it warns in every process that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if text.isalpha() and len(text) > 1:
        return None  # a word
    try:
        if not any(unread_parts(_read(text)[0])):
            return text
        found = parse(
            text,
            [LatexExtractionConfig(), ExprExtractionConfig()],
            parsing_timeout=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - ANTLR and SymPy raise exceptions of many kinds
        return None
    texts = [item for item in found if isinstance(item, str)]
    return texts[-1] if texts else None
