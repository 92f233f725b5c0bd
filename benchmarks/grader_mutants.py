r"""Counts wrong verdicts of the task `math` on mutants and spellings of public reference answers.

    python -m benchmarks.grader_mutants --data DIRECTORY [--seed 0] [--output FILE]

A mutant is a reference answer with a change of its value: a digit, a sign, two numbers, a term, an
exponent, a bracket of an interval, rows of a matrix, an element of a list, a unit. It must be
refused. Units are rare in the answers, so numbers also get one of two units that differ. A
spelling is the same answer written otherwise: it must be accepted. Both are made by kinds from the
text alone, drawn with a seed, so another seed gives others. What the grader decides otherwise is
printed and written to `--output`.

Some changes leave the value as it was (a permutation of a list whose order does not matter, 2^0 and
3^0); `explain` recognises these without the grader, and the rest must be judged by a reader.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bapo_core.seeding import derive_rng
from bapo_core.tasks import VerdictStatus
from bapo_core.tasks.mathematics import MathTask
from services.verifier.pool import VerifierPool

RESULTS = Path(__file__).parents[1] / "tests/unit/core/grader/mutants.json"
DEADLINE_S = 30.0
_NUMBER = re.compile(r"(?<![\d.,_])\d+(?:\.\d+)?(?![\d,]*_)")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textrm|mathrm|begin|end|operatorname)\s*\{[^{}]*\}")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")

Change = Callable[[str, random.Random], str | None]
"""Returns a changed answer; None where the kind does not apply."""


class Case(NamedTuple):
    """A changed reference answer, and whether it must be accepted."""

    source: str
    kind: str
    reference: str
    answer: str
    right: bool


def _spans_outside_text(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    covered = [match.span() for match in _TEXT.finditer(text)]
    return [
        match
        for match in pattern.finditer(text)
        if not any(start <= match.start() < end for start, end in covered)
    ]


def _replace(text: str, match: re.Match[str], replacement: str, group: int = 0) -> str:
    return text[: match.start(group)] + replacement + text[match.end(group) :]


def _choose(pattern: str, text: str, rng: random.Random) -> re.Match[str] | None:
    matches = _spans_outside_text(re.compile(pattern), text)
    return rng.choice(matches) if matches else None


# ---- mutants ------------------------------------------------------------------------------------


def _digit(text: str, rng: random.Random) -> str | None:
    match = _choose(r"\d", text, rng)
    if match is None:
        return None
    return _replace(text, match, rng.choice([d for d in "123456789" if d != match[0]]))


def _sign(text: str, rng: random.Random) -> str | None:
    match = _choose(r"(?<![eE^{])[+-](?=\s*[\d\\a-zA-Z(])", text, rng)
    if match is not None:
        return _replace(text, match, "-" if match[0] == "+" else "+")
    # Only before a number: the sign of a word or of a set has no meaning.
    match = _choose(r"(?<![\d.,^_{\\a-zA-Z}:])\d+", text, rng)
    if match is None or not match[0].strip("0") or r"\pm" in text:
        return None
    return _replace(text, match, f"-{match[0]}")


def _swap(text: str, rng: random.Random) -> str | None:
    numbers = _spans_outside_text(_NUMBER, text)
    pairs = [
        (one, other)
        for index, one in enumerate(numbers)
        for other in numbers[index + 1 :]
        if one[0] != other[0]
    ]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    return (
        text[: one.start()]
        + other[0]
        + text[one.end() : other.start()]
        + one[0]
        + text[other.end() :]
    )


def _term(text: str, rng: random.Random) -> str | None:
    match = _choose(
        r"(?<=[\w})])\s*[+-]\s*(?:\d+|[a-z]|\\pi|\d*\\sqrt\{\d+\})(?=$|[,)\]])", text, rng
    )
    return None if match is None or re.search(r"[-+]\s*0$", match[0]) else _replace(text, match, "")


def _exponent(text: str, rng: random.Random) -> str | None:
    match = _choose(r"(?<=\^)(?:\{(-?\d+)\}|(\d))", text, rng)
    if match is None:
        return None
    return _replace(text, match, f"{{{int(match[1] or match[2]) + rng.choice((-1, 1, 2))}}}")


_OTHER = {"(": "[", "[": "(", ")": "]", "]": ")"}


def _bracket(text: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"(\\left)?([(\[])([^()\[\]]+,[^()\[\]]+?)(\\right)?([)\]])", text.strip())
    if match is None or match[3].count(",") != 1:
        return None
    group = rng.choice((2, 5))
    return _replace(text.strip(), match, _OTHER[match[group]], group)


def _rows(text: str, rng: random.Random) -> str | None:
    match = re.search(r"\\begin\{(.?matrix)\}(.*)\\end\{\1\}", text, re.DOTALL)
    if match is None:
        return None
    rows = [row.split("&") for row in match[2].split(r"\\") if row.strip()]
    changed = [list(row) for row in rows]
    if rng.random() < 0.5 and len(rows) > 1:
        one, other = rng.sample(range(len(rows)), 2)
        changed[one], changed[other] = changed[other], changed[one]
    else:
        changed = [list(column) for column in zip(*rows, strict=False)]
    stripped = [[[cell.strip() for cell in row] for row in grid] for grid in (rows, changed)]
    if stripped[0] == stripped[1]:
        return None
    return _replace(text, match, r" \\ ".join("&".join(row) for row in changed), 2)


_LIST = re.compile(
    r"(\\left)?(\\\{|[(\[])?([^()\[\]{}=<>&]*,[^()\[\]{}=<>&]*?)((?:\\right)?(?:\\\}|[)\]]))?"
)


def _elements(text: str) -> tuple[re.Match[str], list[str]] | None:
    match = _LIST.fullmatch(text.strip())
    if (
        match is None
        or "!" in text
        or r"\," in text
        or re.fullmatch(r"[\d,.]+", text.strip())
        or "\\text" in text
    ):
        return None
    elements = [element.strip() for element in match[3].split(",")]
    return (match, elements) if all(elements) else None


def _element(text: str, rng: random.Random) -> str | None:
    found = _elements(text)
    if found is None:
        return None
    match, elements = found
    index = rng.randrange(len(elements))
    if rng.random() < 0.5 and len(elements) > 2:
        elements.pop(index)
    else:
        elements[index] = f"{elements[index]}+1"
    return _replace(text.strip(), match, ",".join(elements), 3)


UNITS_OF_NUMBERS = (
    *(r"#\text{ cm}", r"#\text{ km}", "# kg", r"#\text{ feet}", r"#\text{ minutes}", "# hours"),
    *("# km/h", r"# \text{ mi/h}", r"#\,\mathrm{km/s}", r"#\,\mathrm{m/s}", r"#\,\mathrm{m/s^2}"),
    *(r"#\mbox{ inches}^2", r"#\text{ cubic inches}", r"#^\circ C", r"#^\circ\text{F}"),
    *("# USD", "# EUR", "£#", r"#\text{ cents}", r"#\%", "# Hz", "# kHz"),
)
"""Forms of a number with a unit; no two have the same unit."""


def _unit(text: str, rng: random.Random) -> str | None:
    units = r"cm|mm|km|m|in|inches|ft|feet|miles|kg|g|lb|pounds|seconds|minutes|hours|days|cents"
    matches = list(re.finditer(rf"(?<=[{{~ ])({units})(?=[}}~ ^/])", text))
    if not matches or not re.search(r"\d", text):
        return None
    match = rng.choice(matches)
    return _replace(text, match, rng.choice([u for u in ("kg", "km", "hours") if u != match[0]]))


def _with_units(text: str, rng: random.Random) -> tuple[str, str] | None:
    """Returns a number with two units that differ."""
    one, other = rng.sample(UNITS_OF_NUMBERS, 2)
    reference, answer = (_around_a_number(form)(text, rng) for form in (one, other))
    return None if reference is None or answer is None else (reference, answer)


MUTANTS: dict[str, Change] = {
    "a digit": _digit,
    "a sign": _sign,
    "two numbers swapped": _swap,
    "a term dropped": _term,
    "an exponent": _exponent,
    "a bracket of an interval": _bracket,
    "rows of a matrix": _rows,
    "an element of a list": _element,
    "a unit": _unit,
}


# ---- spellings ----------------------------------------------------------------------------------


def _substitute(pattern: str, replacement: str) -> Change:
    """Replaces every match outside texts by one of the alternatives, separated by ¦."""

    def change(text: str, rng: random.Random) -> str | None:
        chosen = rng.choice(replacement.split("¦"))
        result = text
        for match in reversed(_spans_outside_text(re.compile(pattern), text)):
            result = _replace(result, match, match.expand(chosen))
        return result if result != text else None

    return change


def _blanks(text: str, rng: random.Random) -> str | None:
    result = text
    for match in reversed(
        _spans_outside_text(re.compile(r"[-+=(),<>]|(?<=[}\d])(?=\\[a-z])"), text)
    ):
        if match[0] in "," and re.search(r"\d,(?:\\!)?\d{3}|\{,\}", text):
            continue
        blank = rng.choice((" ", r"\,", r"\;", r"\ ", "  "))
        result = _replace(result, match, f"{match[0]}{blank}")
    return result if result != text else None


def _decimal(text: str, _: random.Random) -> str | None:
    match = _FRACTION.fullmatch(text.strip())
    if match is not None and int(match[3]):
        value = Fraction(int(match[2]), int(match[3]))
        decimals = f"{float(value):.12f}".rstrip("0").rstrip(".")
        return match[1] + decimals if Fraction(decimals) == value else None
    if re.fullmatch(r"-?\d+\.\d+", text.strip()):
        value = Fraction(text.strip())
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return None


def _unreduced(text: str, rng: random.Random) -> str | None:
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return None
    factor = rng.randint(2, 9)
    return rf"{match[1]}\frac{{{int(match[2]) * factor}}}{{{int(match[3]) * factor}}}"


def _reordered(text: str, rng: random.Random) -> str | None:
    found = _elements(text)
    if found is None or found[0][2] not in (None, r"\{"):
        return None
    match, elements = found
    changed = rng.sample(elements, len(elements))
    return None if changed == elements else _replace(text.strip(), match, ", ".join(changed), 3)


def _thousands(text: str, rng: random.Random) -> str | None:
    plain = text.strip().replace(r",\!", "").replace("{,}", "")
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+", plain):
        plain = plain.replace(",", "")
    if not re.fullmatch(r"-?\d{4,}", plain):
        return None
    separator = rng.choice((",", "{,}", r"\,", r",\!", "~", "", r"\ "))
    result = f"{int(plain):,}".replace(",", separator)
    return result if result != text.strip() else None


def _around_a_number(*forms: str) -> Change:
    def change(text: str, rng: random.Random) -> str | None:
        if not re.fullmatch(
            r"-?(?:\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\})", text.strip()
        ):
            return None
        return rng.choice(forms).replace("#", text.strip())

    return change


def _around(*forms: str) -> Change:
    return lambda text, rng: rng.choice(forms).replace("#", text.strip())


def _named(text: str, rng: random.Random) -> str | None:
    if re.search(
        r"[=<>,]|\\(?:text|in|l?eq?|le|leq(?:slant)?|geq?(?:slant)?|neq?|approx|equiv|pm|cup|begin|mbox|mathrm)(?![a-z])|:",
        text,
    ):
        return None
    return f"{rng.choice('xyzAN')} = {text.strip()}"


def _summands(text: str, _: random.Random) -> str | None:
    match = re.fullmatch(
        r"(\d*[a-z](?:\^\d)?|\d*\\sqrt\{\d+\}|\d+|\d*\\pi)\s*([+-])\s*(\d*[a-z](?:\^\d)?|\d+|\d*\\sqrt\{\d+\})",
        text.strip(),
    )
    if match is None or re.match(r"\de", text.strip()):
        return None
    first, sign, second = match.groups()
    return f"{second}+{first}" if sign == "+" else f"-{second}+{first}"


def _changed(change: Callable[[str], str]) -> Change:
    """Returns a change that does not apply where it leaves the text as it was."""

    def apply(text: str, _: random.Random) -> str | None:
        result = change(text)
        return result if result != text else None

    return apply


def _sized_brackets(text: str, _: random.Random) -> str | None:
    opened, closed = (len(re.findall(kind, text)) for kind in (r"[(\[]", r"[)\]]"))
    if r"\left" in text or not opened or opened != closed or re.search(r"\\sqrt\[|\\\\\[", text):
        return None
    return re.sub(r"([)\]])", r"\\right\1", re.sub(r"([(\[])", r"\\left\1", text))


_DEGREE_MARKS = _substitute(r"\^\{?\\circ\}?", r"¦°¦\\degree ¦^{\\circ}")
_WITH_DEGREES = _around_a_number(r"#^\circ", "#°", r"#^{\circ}")


def _degrees(text: str, rng: random.Random) -> str | None:
    if r"\circ" in text:
        # An angle in a function is no bare number.
        return (
            None if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text) else _DEGREE_MARKS(text, rng)
        )
    return _WITH_DEGREES(text, rng)


def _slash(text: str, _: random.Random) -> str | None:
    match = _FRACTION.fullmatch(text.strip())
    return None if match is None else f"{match[1]}{match[2]}/{match[3]}"


def _without_braces(text: str) -> str:
    text = re.sub(r"\^\{(\d|[a-z])\}(?!\d)", r"^\1", text)
    return re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", text)


def _with_braces(text: str) -> str:
    text = re.sub(r"\^(\d|[a-z])", r"^{\1}", text)
    return re.sub(r"\\(d?frac)\s*(\d)(\d)", r"\\\1{\2}{\3}", text)


_UNICODE = (
    (r"\\pi(?![a-z])\s*", "π"),
    (r"\\cdot(?![a-z])\s*", "·"),
    (r"\\times(?![a-z])\s*", "×"),
    (r"\\infty(?![a-z])", "∞"),
    (r"\\cup(?![a-z])", "∪"),
    (r"\\le(?:q|qslant)?(?![a-z])", "≤"),
    (r"\\ge(?:q)?(?![a-z])", "≥"),
    (r"\\theta(?![a-z])\s*", "θ"),
    (r"\\sqrt\{(\d+)\}", r"√\1"),
    (r"\^(?:\{2\}|2(?!\d))", "²"),
    (r"\^(?:\{3\}|3(?!\d))", "³"),
    (r"(?<![a-z}{])-", "−"),
    (r"^\\frac\{1\}\{2\}", "½"),
    (r"^\\frac\{3\}\{4\}", "¾"),
)
_FULL_WIDTH = {ord(c): chr(ord(c) + 0xFEE0) for c in "0123456789(),.-"}


def _unicode(text: str) -> str:
    for command, sign in _UNICODE:
        text = re.sub(command, sign, text)
    return text


def _full_width(text: str) -> str:
    return text.translate(_FULL_WIDTH) if re.fullmatch(r"[-\d.,()]+", text) else text


def _bare_words(text: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"\\text\{\s*([A-Za-z]+)\s*\}", text.strip())
    if match is None:
        return None
    return rng.choice((match[1], rf"\textbf{{{match[1]}}}", rf"\mathrm{{{match[1]}}}"))


SPELLINGS: dict[str, Change] = {
    r"\dfrac, \tfrac": _substitute(r"\\frac(?![a-z])", r"\\dfrac¦\\tfrac¦\\cfrac"),
    "blanks": _blanks,
    r"\left, \right": _sized_brackets,
    r"without \left": _substitute(r"\\(?:left|right)(?![a-z])", "¦ "),
    "decimals and fractions": _decimal,
    "not reduced": _unreduced,
    "reordered": _reordered,
    "thousands": _thousands,
    "degrees": _degrees,
    "units": _around_a_number(
        r"# \text{ cm}",
        r"#\text{ units}",
        r"# \mathrm{~kg}",
        r"#\text{ square inches}",
        r"# \text{ km/h}",
        r"# cm",
        r"#\mbox{ inches}^2",
        r"# \text{ people}",
        r"#\,\mathrm{m/s^2}",
        "# km/h",
        "# USD",
        "#°C",
        "€#",
        r"\$#",
        r"#\%",
    ),
    "text around": _around(
        "$#$", r"\boxed{#}", "#.", r"\(#\)", "**#**", r"$\displaystyle #$", "{#}"
    ),
    "a name in front": _named,
    "a slash": _slash,
    "without braces": _changed(_without_braces),
    "with braces": _changed(_with_braces),
    "Unicode": _changed(_unicode),
    "full width": _changed(_full_width),
    "another matrix": _changed(lambda text: text.replace("{pmatrix}", "{bmatrix}")),
    "a sign of multiplication": _substitute(
        r"(?<=\d)(?=\\(?:sqrt|pi)(?![a-z]))", r" \\cdot ¦ \\times "
    ),
    "summands in another order": _summands,
    "words without a command": _bare_words,
    "infix fractions": _substitute(r"\\frac\{(\d+)\}\{(\d+)\}", r"{\1 \\over \2}"),
}


# ---- cases --------------------------------------------------------------------------------------


def reference_answers(directory: Path) -> Iterator[tuple[str, str]]:
    """Yields (file, reference answer) of the public sets, each answer of a file once."""
    for file in sorted(directory.glob("*.json")):
        answers: dict[str, None] = {}
        for row in json.loads(file.read_text()):
            answer = row["answer"]
            if isinstance(answer, str) and answer.startswith("["):
                with suppress(ValueError, SyntaxError):
                    answer = ast.literal_eval(answer)
            for text in answer if isinstance(answer, list) else [answer]:
                if text is not None and str(text).strip():
                    answers[str(text).strip()] = None
        yield from ((file.stem, answer) for answer in answers)


def make_cases(references: Iterable[tuple[str, str]], seed: int) -> Iterator[Case]:
    """Yields the mutants and spellings of reference answers, one of each kind that applies."""
    for source, reference in references:
        for kinds, right in ((MUTANTS, False), (SPELLINGS, True)):
            for kind, change in kinds.items():
                answer = change(reference, derive_rng(seed, "grader mutants", kind, reference))
                if answer is not None and answer.strip() != reference.strip():
                    yield Case(source, kind, reference, answer, right)
        pair = _with_units(reference, derive_rng(seed, "grader mutants", "units", reference))
        if pair is not None:
            yield Case(source, "two units", *pair, right=False)


def explain(case: Case) -> str | None:
    """Returns why an accepted mutant is no wrong verdict, as far as its text shows it."""
    elements = [sorted(_top_elements(text)) for text in (case.reference, case.answer)]
    if len(elements[0]) > 1 and elements[0] == elements[1]:
        return "a permutation of a list whose order does not matter"
    operands = [
        sorted(re.split(r"\+|\\cdot(?![a-z])|(?<=\))(?=\()", re.sub(r"[\s$]", "", text)))
        for text in (case.reference, case.answer)
    ]
    if len(operands[0]) > 1 and operands[0] == operands[1]:
        return "the same terms or factors in another order"
    return None


def _top_elements(text: str) -> list[str]:
    """Returns the elements of a list without brackets or in braces; [text] of anything else."""
    plain = re.sub(r"\\(?:text|mbox)\{[ ,]*(?:and|or)?[ ,]*\}", ",", text)
    plain = re.sub(r"\\[;, !]|[\s$]|\\q?quad", "", plain)
    if re.match(r"\\\{.*\\\}$", plain):
        plain = plain[2:-2]
    elements, depth = [""], 0
    for character in plain:
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    # x = 1, 2 names the variable once
    elements[0] = (
        elements[0].rpartition("=")[2] if "=" not in "".join(elements[1:]) else elements[0]
    )
    return [element for element in elements if element]


def grade(cases: Sequence[Case]) -> list[str]:
    """Returns the status of the verdict on each case."""
    pool = VerifierPool(workers=1, deadline_s=DEADLINE_S)
    work = [({"answer": case.reference}, rf"\boxed{{{case.answer}}}") for case in cases]
    try:
        return [verdict.status for verdict in pool.verify(MathTask.name, {}, work)]
    finally:
        pool.close()


def find_disagreements(cases: Sequence[Case], statuses: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the accepted mutants and the refused spellings."""
    return [
        {**case._asdict(), "status": status, "judgement": None if case.right else explain(case)}
        for case, status in zip(cases, statuses, strict=True)
        if (status == VerdictStatus.OK) != case.right
    ]


def measure_median(cases: Sequence[Case]) -> float:
    """Returns the median milliseconds of a verdict in this process, on cases in random order."""
    task = MathTask()
    task.warm_up()
    times = []
    for case in random.Random(0).sample(list(cases), min(2_000, len(cases))):
        begin = time.perf_counter()
        task.verify({"answer": case.reference}, rf"\boxed{{{case.answer}}}")
        times.append(1_000 * (time.perf_counter() - begin))
    return median(times)


def summarise(cases: Sequence[Case], found: Sequence[dict[str, Any]]) -> str:
    """Returns a table: how many of each kind there are, and how many got another verdict."""
    counts = Counter((case.right, case.kind) for case in cases)
    wrong = Counter((item["right"], item["kind"]) for item in found)
    explained = sum(item["judgement"] is not None for item in found)
    lines = [f"{'kind':36} cases  other verdict"]
    lines += [
        f"{kind:36} {count:5}  {wrong[right, kind]:5}"
        for (right, kind), count in sorted(counts.items())
    ]
    mutants = sum(not case.right for case in cases)
    accepted = sum(not item["right"] for item in found)
    spellings, refused = len(cases) - mutants, len(found) - accepted
    return "\n".join(
        [
            *lines,
            f"mutants accepted: {accepted} of {mutants}, of them permutations: {explained}",
            f"spellings accepted: {spellings - refused} of {spellings} "
            f"({(spellings - refused) / max(1, spellings):.2%})",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory of the public sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for the disagreements")
    arguments = parser.parse_args()
    cases = list(make_cases(reference_answers(arguments.data), arguments.seed))
    found = find_disagreements(cases, grade(cases))
    print(summarise(cases, found))
    print(f"median verdict: {measure_median(cases):.3f} ms")
    for item in found:
        print(json.dumps(item, ensure_ascii=False))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
