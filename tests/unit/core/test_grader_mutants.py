"""Mutants of reference answers are refused and other spellings accepted, whatever the seed.

`python -m benchmarks.grader_mutants` does the same with every answer of the public sets.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.grader_agreement import PAIRS
from benchmarks.grader_mutants import (
    MUTANTS,
    RESULTS,
    SPELLINGS,
    explain,
    find_disagreements,
    grade,
    make_cases,
)

REFERENCES = [
    r"\frac{3}{4}",
    r"\frac{2}{3}",
    r"-\frac{15}{8}",
    "0.125",
    "1234567",
    r"10,\!080",
    "73",
    "-12",
    r"60^\circ",
    r"2\sqrt{3}",
    r"5\pi",
    r"3+2\sqrt{5}",
    r"\frac{\pi}{6}",
    "x^2+3x-7",
    "4x^3-x",
    "(x+2)(x-5)",
    "2^{100}-1",
    r"2.88 \times 10^{-19}",
    r"\frac{24 \cdot 48!}{52!}",
    "(3,-4)",
    "[2,7)",
    r"\left( -\infty, 3 \right]",
    r"[-1,0) \cup (2,\infty)",
    r"\{1,4,9\}",
    "2, 3, 5",
    r"1 \text{ and } 8",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
    "y = 2x + 3",
    "x^2 + y^2 = 25",
    r"0 < x \le 5",
    r"1 \pm \sqrt{7}",
    r"12 \text{ cm}^2",
    r"\text{even}",
    "1011_2",
    "3 - 2i",
    r"\hbar \omega(v+1/2)-\frac{E_{0}^{2}}{2 m}",
]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mutants_are_refused_and_spellings_accepted(seed: int) -> None:
    pairs = json.loads(PAIRS.read_text())["pairs"]
    texts = {pair["reference"] for pair in pairs if pair["class"] in ("equal", "equivalent")}
    references = [("sample", text) for text in (*REFERENCES, *sorted(texts))]
    cases = list(make_cases(references, seed))
    assert {case.kind for case in cases} == {*MUTANTS, *SPELLINGS, "two units"}
    found = find_disagreements(cases, grade(cases))
    assert [item for item in found if item["judgement"] is None] == []


def test_every_recorded_disagreement_has_a_judgement() -> None:
    recorded = json.loads(RESULTS.read_text())
    assert all(item["judgement"] for item in recorded)
    assert not any(item["right"] for item in recorded)  # every spelling is accepted
    unexplained = {item["judgement"] for item in recorded} - {
        "a permutation of a list whose order does not matter",
        "the same terms or factors in another order",
    }
    assert unexplained == {"the same value: the mutant is an equivalent answer"}


def test_a_permutation_is_recognised_without_the_grader() -> None:
    case = next(iter(make_cases([("sample", "2, 3")], 0)))
    assert explain(case._replace(answer="3, 2")) is not None
    assert explain(case._replace(answer="3, 3")) is None
