r"""Mathematics with a known answer, compared by the math-verify library.

A payload is {"problem": text, "answer": the right answer, as LaTeX or plain}, the columns of the
public datasets in the style of MATH.

What counts as the answer of a response: the content of its last complete \boxed{...}; without any
\boxed, the last thing near its end that math-verify takes for one. What counts as equal is
math-verify's to say, and generous (docs/verifier.md lists how), with two exceptions made here:
equations that are false in themselves (7 = 42) are wrong, and so are small numbers rounded to 0.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from bapo_core.tasks.base import Message, Payload, Verdict, VerdictStatus
from bapo_core.tasks.files import rows_of

MAX_ANSWER = 1_000
"""Characters of an answer; longer ones are not parsed."""
MAX_TAIL = 1_000
"""Characters at the end of a response without \\boxed where an answer is looked for."""

_BRACES = re.compile(r"\\boxed\s*\{|\\fbox\s*\{|\\.|[{}]", re.DOTALL)
_BLANKS = re.compile(r"\s+")
_DECIMALS = 6
_EXAMPLE = '{"problem": "What is $6 \\\\cdot 7$?", "answer": "42"}'


@dataclass(frozen=True, slots=True)
class MathTask:
    """Mathematics with one instruction to the model."""

    name: ClassVar[str] = "math"

    instruction: str = r"Reason step by step, and put your final answer within \boxed{}."
    """Follows the problem in the user message."""
    boxed_only: bool = False
    r"""Whether a response without \boxed has no answer."""

    def uid(self, payload: Payload) -> str:
        """ "math:<hash of the problem>": blanks apart, the same problem has the same uid."""
        problem = _BLANKS.sub(" ", payload["problem"]).strip()
        return f"math:{hashlib.sha256(problem.encode(errors='surrogatepass')).hexdigest()[:16]}"

    def render(self, payload: Payload) -> list[Message]:
        """One user message."""
        return [{"role": "user", "content": f"{payload['problem']}\n\n{self.instruction}"}]

    def warm_up(self) -> None:
        """Imports SymPy and builds the grammar's tables: a second that no response should pay."""
        self.verify({"answer": "1"}, r"\boxed{\frac{2}{2}}")
        self.verify({"answer": "1"}, "x = 2/2")

    def verify(self, payload: Payload, response: str) -> Verdict:
        """Reward 1 iff the answer equals `payload["answer"]`.

        Takes as long as SymPy likes, for ever included: the caller sets the deadline. math-verify
        could set one itself, but by a signal that only a main thread may use.
        """
        answer = _boxed(response)
        if answer is None:
            return self._verify_plain(payload, response)
        if not answer:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "the box is empty")
        if len(answer) > MAX_ANSWER:
            detail = f"the answer is longer than {MAX_ANSWER} characters"
            return Verdict(0.0, VerdictStatus.TOO_LARGE, None, detail)
        if _BLANKS.sub("", answer) == _BLANKS.sub("", _gold_text(payload)):
            return Verdict(1.0, VerdictStatus.OK, answer)
        return _judged(payload, answer, _parse_latex)

    def _verify_plain(self, payload: Payload, response: str) -> Verdict:
        # A box that never closes is an answer cut short, not an answer elsewhere.
        if self.boxed_only or r"\boxed" in response:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, r"no complete \boxed{...}")
        tail = response[-MAX_TAIL:].strip()
        if not tail:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        verdict = _judged(payload, tail, _parse_text)
        if verdict.status == VerdictStatus.PARSE_ERROR:
            return Verdict(0.0, VerdictStatus.NO_ANSWER, None, "no answer found")
        return verdict

    def load(self, path: str | Path, *, limit: int | None = None) -> list[Payload]:
        """The problems of a `.parquet` or `.jsonl` file with columns `problem` and `answer`.

        Reads at most `limit` rows; a problem that repeats is kept once, where it first stands.
        Raises `ValueError` naming file and row unless both are text (an answer may be a number).
        """
        problems: dict[str, Payload] = {}
        for where, row in rows_of(path, ("problem", "answer"), _EXAMPLE, limit=limit):
            problem = _checked(row, where)
            problems.setdefault(self.uid(problem), problem)
        return list(problems.values())


def _boxed(response: str) -> str | None:
    r"""The content of the last \boxed{...} to close; time linear in the response."""
    found: tuple[int, int] | None = None
    open_at: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(response):
        token = match.group()
        if token == "}":
            if open_at:
                is_box, start = open_at.pop()
                if is_box:
                    found = start, match.start()
        elif token.endswith("{") and token != r"\{":
            open_at.append((token != "{", match.end()))
    return None if found is None else response[found[0] : found[1]].strip()


def _gold_text(payload: Payload) -> str:
    """The right answer without \\boxed and dollars."""
    gold = str(payload["answer"])
    boxed = _boxed(gold)
    return (gold if boxed is None else boxed).strip().strip("$").strip()


# ---- math-verify, imported when first used: `bapo_core` must import without it ------------------


def _parse_latex(text: str) -> list[Any]:
    """What LaTeX without any text around it means; [] if nothing."""
    from math_verify import LatexExtractionConfig

    return _parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)])


def _parse_text(text: str) -> list[Any]:
    """The answer that a text leads up to; [] if none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return _parse(text, [LatexExtractionConfig(), ExprExtractionConfig()])


def _parse(text: str, configs: Sequence[Any]) -> list[Any]:
    from math_verify import parse

    # It warns, in every process, that there is no timeout.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(
        text, configs, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    return found


def _equal(gold: Any, found: Any, decimals: int = _DECIMALS) -> bool:
    from math_verify import verify

    return bool(
        verify(gold, found, float_rounding=decimals, timeout_seconds=None, raise_on_error=True)
    )


# The G responses to a prompt share it, and prompts come again.
@lru_cache(maxsize=1024)
def _parsed_gold(text: str) -> tuple[list[Any], int]:
    """(what the right answer means, decimals to compare floats by)."""
    gold = _parse_latex(text) or _parse_text(text)
    try:
        size = abs(float(gold[0])) if gold else 0.0
    except (TypeError, ValueError, OverflowError):
        return gold, _DECIMALS  # not a number, or a huge one
    # math-verify rounds to 6 decimals: 10^-7 would equal 0.
    small = 0 < size < 1
    return gold, _DECIMALS + (math.floor(-math.log10(size)) if small else 0)


def _judged(payload: Payload, answer: str, parse: Callable[[str], list[Any]]) -> Verdict:
    try:
        gold, decimals = _parsed_gold(_gold_text(payload))
        found = parse(answer)
        if not found:
            return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, "not mathematics")
        equal = bool(gold) and not _contradicts(found[0]) and _equal(gold, found, decimals)
    except MemoryError:
        raise  # the process may be beyond use; who runs it must know
    except Exception as error:  # noqa: BLE001
        # ANTLR, latex2sympy and SymPy raise whatever their depths raise on odd input (TypeError,
        # KeyError, RecursionError, NotImplementedError, ...). Whichever it is, there is no value
        # to compare, and a response must not choose which of our callers it reaches.
        return Verdict(0.0, VerdictStatus.PARSE_ERROR, answer, type(error).__name__)
    if not equal:
        return Verdict(
            0.0, VerdictStatus.WRONG_VALUE, answer, f"does not equal {payload['answer']}"
        )
    return Verdict(1.0, VerdictStatus.OK, answer)


def _contradicts(found: Any) -> bool:
    """Whether `found` has an equation of two numbers that differ, such as 7 = 42.

    math-verify looks at the last right-hand side only.
    """
    from sympy import Eq

    equations = [found] if isinstance(found, Eq) else list(getattr(found, "_unsorted_args", ()))
    return any(
        isinstance(equation, Eq)
        and not equation.free_symbols
        and not _equal(equation.lhs, equation.rhs)
        for equation in equations
    )


def _checked(row: dict[str, Any], where: str) -> Payload:
    problem, answer = row["problem"], row["answer"]
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"{where}: problem is {problem!r:.80}; make it the text of a problem")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"{where}: answer is {answer!r:.80}; make it text or a number, not empty")
    return {"problem": problem, "answer": answer}
