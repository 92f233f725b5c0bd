"""Compares the grader of the task `math` with that of the MoPPS and DeepScaleR code on 500 pairs.

    python -m benchmarks.grader_agreement --other deepscaler_reward.py

The pairs are constructed: each has a reference answer, a response, and whether it is correct. They
are drawn from a fixed seed, so the file that this writes changes only if a grader does. The other
grader is a file of a public repository, which needs `pylatexenc`; it is not part of bapo, and
without `--other` its recorded verdicts are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bapo_core.seeding import derive_rng
from bapo_core.tasks import MathTask
from services.verifier.pool import VerifierPool

PAIRS = Path(__file__).parents[1] / "tests/unit/core/grader/pairs.json"
SOURCE = {
    "repository": "https://github.com/thu-rllab/MoPPS",
    "commit": "a883f519bb2ec9e6bea3cb586639ee9c4f4cf146",
    "file": "recipe/ours/reward_func/deepscaler_reward.py",
    "function": "deepscaler_reward_fn",
    "packages": "pylatexenc 2.10",
}
EACH = 10
"""Pairs of each form; 50 forms make 500 pairs."""
DEADLINE_S = 30.0


class Pair(NamedTuple):
    """A reference answer and the text of a response after its reasoning."""

    reference: str
    response: str


Draw = Callable[[random.Random], Pair]


def boxed(reference: str, answer: str) -> Pair:
    return Pair(reference, f"The answer is $\\boxed{{{answer}}}$.")


def _number(rng: random.Random) -> int:
    return rng.randint(2, 99)


def _fraction(rng: random.Random) -> tuple[int, int]:
    """Returns a reduced fraction whose decimals do not end."""
    denominator = rng.choice([3, 7, 9, 11, 13])
    numerator = rng.choice([n for n in range(1, 40) if n % denominator])
    return numerator, denominator


def _plain(answer: Callable[[random.Random], str]) -> Draw:
    """Returns pairs whose answer is the reference itself."""

    def draw(rng: random.Random) -> Pair:
        text = answer(rng)
        return boxed(text, text)

    return draw


def _both(make: Callable[[random.Random], tuple[str, str]]) -> Draw:
    return lambda rng: boxed(*make(rng))


def _frac(pair: tuple[int, int], command: str = "frac") -> str:
    return f"\\{command}{{{pair[0]}}}{{{pair[1]}}}"


def _tex(make: Callable[[int, int, int], tuple[str, str]]) -> Draw:
    """Returns pairs that are made of three different numbers in ascending order."""
    return _both(lambda rng: make(*sorted(rng.sample(range(2, 50), 3))))


EQUAL: dict[str, Draw] = {
    "integer": _plain(lambda rng: str(rng.randint(-999, 999))),
    "fraction": _plain(lambda rng: _frac(_fraction(rng))),
    "radical": _plain(lambda rng: f"{_number(rng)}\\sqrt{{{rng.choice([2, 3, 5, 7])}}}"),
    "interval": _tex(lambda a, b, c: (f"[{a},{b}) \\cup ({c},\\infty)",) * 2),
    "text": _plain(lambda rng: f"\\text{{{rng.choice(['Monday', 'even', 'Alice', 'blue'])}}}"),
    "several boxes, the last is right": lambda rng: (
        lambda n: Pair(str(n), f"First $\\boxed{{{n + 1}}}$, corrected: $\\boxed{{{n}}}$.")
    )(_number(rng)),
    "box in the reference": lambda rng: (lambda n: boxed(f"\\boxed{{{n}}}", str(n)))(_number(rng)),
}

EQUIVALENT: dict[str, Draw] = {
    "decimal of a fraction that ends": _both(
        lambda rng: (lambda n: (f"\\frac{{{n}}}{{4}}", f"{n / 4:g}"))(rng.choice(range(1, 99, 2)))
    ),
    "decimals of a fraction to 6 places": _both(
        lambda rng: (lambda f: (_frac(f), f"{f[0] / f[1]:.6f}"))(_fraction(rng))
    ),
    "dfrac and tfrac": _both(
        lambda rng: (lambda f: (_frac(f), _frac(f, rng.choice(["dfrac", "tfrac"]))))(_fraction(rng))
    ),
    "a slash": _both(lambda rng: (lambda f: (_frac(f), f"{f[0]}/{f[1]}"))(_fraction(rng))),
    "a fraction that is not reduced": _both(
        lambda rng: (lambda f, n: (_frac(f), _frac((f[0] * n, f[1] * n))))(
            _fraction(rng), rng.randint(2, 5)
        )
    ),
    "an integer as a quotient": _both(
        lambda rng: (lambda n: (str(n), f"\\frac{{{2 * n}}}{{2}}"))(_number(rng))
    ),
    "an integer as arithmetic": _tex(lambda a, b, c: (str(a * b + c), f"{a} \\cdot {b} + {c}")),
    "an integer as a decimal": _both(lambda rng: (lambda n: (str(n), f"{n}.0"))(_number(rng))),
    "thousands separators": _both(
        lambda rng: (lambda n: (str(n), f"{n:,}"))(rng.randint(1_000, 9_999_999))
    ),
    "a unit": _both(
        lambda rng: (lambda n: (str(n), f"{n} \\text{{ {rng.choice(['cm', 'hours', 'apples'])}}}"))(
            _number(rng)
        )
    ),
    "degrees": _both(lambda rng: (lambda n: (str(n), f"{n}^\\circ"))(_number(rng))),
    "per cent": _both(lambda rng: (lambda n: (str(n), f"{n}\\%"))(_number(rng))),
    "a mixed number": _both(
        lambda rng: (lambda n: (f"\\frac{{{3 * n + 1}}}{{3}}", f"{n}\\frac{{1}}{{3}}"))(
            _number(rng)
        )
    ),
    "a variable in front": _both(lambda rng: (lambda n: (str(n), f"x = {n}"))(_number(rng))),
    "terms in another order": _tex(lambda a, b, _: (f"{a}x+{b}", f"{b}+{a}x")),
    "factors multiplied out": _tex(lambda a, b, _: (f"(x+{a})(x-{b})", f"x^2{a - b:+d}x-{a * b}")),
    "a radical that is not simplified": _tex(
        lambda a, _b, _c: (f"{a}\\sqrt{{3}}", f"\\sqrt{{{3 * a * a}}}")
    ),
    "a rationalised denominator": _tex(
        lambda a, _b, _c: (f"\\frac{{\\sqrt{{{a}}}}}{{{a}}}", f"\\frac{{1}}{{\\sqrt{{{a}}}}}")
    ),
    "a set in another order": _tex(
        lambda a, b, c: (f"\\{{{a},{b},{c}\\}}", f"\\{{{c},{a},{b}\\}}")
    ),
    "scientific notation": _both(
        lambda rng: (lambda n, e: (f"{n / 10}e{e}", f"{n / 10} \\times 10^{{{e}}}"))(
            rng.randint(11, 99), rng.randint(5, 30)
        )
    ),
}

WRONG: dict[str, Draw] = {
    "off by one": _both(
        lambda rng: (lambda n: (str(n), str(n + rng.choice([-1, 1]))))(_number(rng))
    ),
    "another sign": _both(lambda rng: (lambda n: (str(n), f"-{n}"))(_number(rng))),
    "an inverted fraction": _both(
        lambda rng: (lambda f: (_frac(f), _frac((f[1], f[0]))))(_fraction(rng))
    ),
    "decimals to 2 places": _both(
        lambda rng: (lambda f: (_frac(f), f"{f[0] / f[1]:.2f}"))(_fraction(rng))
    ),
    "a hundredth": _both(
        lambda rng: (lambda n: (f"{n / 100:.2f}", str(n)))(rng.choice(range(11, 99, 2)))
    ),
    "a pair in another order": _tex(lambda a, b, _: (f"({a},{b})", f"({b},{a})")),
    "an open for a closed interval": _tex(lambda a, b, _: (f"[{a},{b}]", f"({a},{b})")),
    "a missing element": _tex(lambda a, b, c: (f"{a},{b},{c}", f"{a},{b}")),
    "another radicand": _tex(lambda a, b, c: (f"{a}\\sqrt{{{b}}}", f"{a}\\sqrt{{{c}}}")),
    "another word": _both(
        lambda rng: tuple(  # type: ignore[arg-type,return-value]
            f"\\text{{{word}}}" for word in rng.sample(["odd", "even", "Alice", "Bob"], 2)
        )
    ),
    "an equation that contradicts itself": _tex(lambda a, b, _: (str(b), f"{a} = {b}")),
    "another exponent": _tex(lambda a, _b, _c: (f"{a}x^2", f"{a}x^3")),
    "a set for a pair": _tex(lambda a, b, _: (f"({a},{b})", f"\\{{{a},{b}\\}}")),
    "letters in another order": _both(
        lambda rng: (lambda word: (word, word[::-1]))("".join(rng.sample("ABCDFGHJKL", 4)))
    ),
    "another unit": _both(
        lambda rng: (lambda n: (f"{n} \\text{{ cm}}", f"{n} \\text{{ m}}"))(_number(rng))
    ),
}

MALFORMED: dict[str, Draw] = {
    "no box": lambda rng: (lambda n: Pair(str(n), f"The answer is ${n}$."))(_number(rng)),
    "a box that is not closed": lambda rng: (
        lambda n: Pair(str(n), f"The answer is $\\boxed{{{n}")
    )(_number(rng)),
    "an empty box": lambda rng: Pair(str(_number(rng)), "The answer is $\\boxed{}$."),
    "a wrong box, the answer after it": lambda rng: (
        lambda n: Pair(str(n), f"$\\boxed{{{n + 1}}}$, that is, {n}.")
    )(_number(rng)),
    "several candidates in the box": _tex(
        lambda a, b, c: (str(c), f"{a} \\text{{ or }} {b} \\text{{ or }} {c}")
    ),
    "a placeholder": lambda rng: boxed(
        str(_number(rng)), rng.choice(["answer", "...", "?", "\\text{your answer}", "x"])
    ),
    "broken LaTeX": lambda rng: (lambda f: boxed(_frac(f), f"\\frac{{{f[0]}}}{{"))(_fraction(rng)),
    "a second box that is cut off": lambda rng: (
        lambda n: Pair(str(n), f"$\\boxed{{{n + 1}}}$. No, wait: $\\boxed{{{n}")
    )(_number(rng)),
}

CLASSES = {"equal": EQUAL, "equivalent": EQUIVALENT, "wrong": WRONG, "malformed": MALFORMED}


def construct() -> Iterator[dict[str, Any]]:
    """Yields the pairs; `correct` is what a perfect grader says."""
    for name, forms in CLASSES.items():
        for form, draw in forms.items():
            rng = derive_rng(0, "grader pairs", name, form)
            for _ in range(EACH):
                yield {
                    "class": name,
                    "form": form,
                    **draw(rng)._asdict(),
                    "correct": name in ("equal", "equivalent"),
                }


def grade(pairs: list[dict[str, Any]]) -> list[str]:
    """Returns the status of our verdict on each pair."""
    pool = VerifierPool(workers=1, deadline_s=DEADLINE_S)
    work = [({"answer": pair["reference"]}, pair["response"]) for pair in pairs]
    try:
        return [verdict.status for verdict in pool.verify(MathTask.name, {}, work)]
    finally:
        pool.close()


def grade_by_other(file: Path, pairs: list[dict[str, Any]]) -> list[bool]:
    """Returns the verdicts of the other grader; an exception counts as refused, as in training.

    It reads nothing before the end of the reasoning, so each response follows an empty one.
    """
    spec = importlib.util.spec_from_file_location("other_grader", file)
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(other)
        return [_accepts(other, pair) for pair in pairs]


def _accepts(other: Any, pair: dict[str, Any]) -> bool:
    try:
        response = f"<think></think>{pair['response']}"
        return bool(other.deepscaler_reward_fn(response, pair["reference"]))
    except Exception:  # noqa: BLE001, because a grader of others may raise anything
        return False


def summarise(pairs: list[dict[str, Any]]) -> str:
    """Returns a table of the forms: how many of each both graders accept."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for pair in pairs:
        count = counts.setdefault((pair["class"], pair["form"]), Counter())
        ours = pair["ours"] == "ok"
        count.update(ours=ours, other=pair["other"], agree=ours == pair["other"])
    lines = [f"{'pairs':46} bapo other agree"]
    for (name, form), count in counts.items():
        lines.append(
            f"{f'{name}: {form}':46} {count['ours']:4} {count['other']:5} {count['agree']:5}"
        )
    agreed = sum(count["agree"] for count in counts.values())
    for grader in ("ours", "other"):
        right = sum((pair[grader] in (True, "ok")) == pair["correct"] for pair in pairs)
        lines.append(f"{grader}: {right} of {len(pairs)} as constructed")
    return "\n".join([*lines, f"agreement: {agreed} of {len(pairs)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, help="the other grader's file")
    arguments = parser.parse_args()
    pairs = list(construct())
    if arguments.other is None:
        verdicts = [pair["other"] for pair in json.loads(PAIRS.read_text())["pairs"]]
    else:
        verdicts = grade_by_other(arguments.other, pairs)
    for pair, ours, other in zip(pairs, grade(pairs), verdicts, strict=True):
        pair |= {"ours": ours, "other": other}
    lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
    PAIRS.write_text(f'{{"other": {json.dumps(SOURCE)},\n "pairs": [\n{lines}\n]}}\n')
    print(summarise(pairs))


if __name__ == "__main__":
    main()
