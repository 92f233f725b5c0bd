"""Answers are compared as a reader compares them: by their parts and values, read as a whole.

Each list has the reference answer and the content of the response's box.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_core.tasks import MathTask, math_equality
from bapo_core.tasks.latex import normalise_tokens, split_tokens
from bapo_core.tasks.math_answers import read_answer

TASK = MathTask()

EQUAL = [
    (r"\begin{pmatrix} 1 \\[2ex] 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\text{No}", "no."),
    (
        r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
        r"\begin{bmatrix} -7 \\ 16 \\ 5 \end{bmatrix}",
    ),
    (r"\begin{pmatrix} 1/3 \\ 2 \end{pmatrix}", r"\begin{pmatrix} \frac13\\2\end{pmatrix}"),
    (
        r"\begin{pmatrix} 1/3 & 2 \\ 0& 1\end{pmatrix}",
        r"\left[\begin{array}{cc} \frac13 & 2\\0 & 1\end{array}\right]",
    ),
    ("3.5", "3 1/2"),
    ("7/2", "3 1/2"),
    (r"2007 + \frac\pi 2", r"2007+\frac{\pi}{2}"),
    (r"0.\overline{3}", r"\frac13"),
    ("7:30 p.m.", "7:30 p.m."),
    ("7:30 p.m.", r"7:30 \text{ p.m.}"),
    (r"10,\!080", "10080"),
    (r"29,\!322,\!216", "29,322,216"),
    ("2t", "2t"),
    (r"\pi r^2 h", r"\pi h r^2"),
    ("a+b+c", "c+b+a"),
    ("14 - i", "14.0 + -1.0i"),
    (r"\emptyset", r"\varnothing"),
    (r"\frac12", r"\sin 30^\circ"),
    ("a^2+b^2", "(a+b)^2 - 2ab"),
    ("(0,12.5)", "0<x<12.5"),
    ("0<x<12.5", "(0,12.5)"),
    ("73", "**73**"),
    ("½", "0.5"),
    ("x^2", "x²"),
    ("(3,4)", "（３，４）"),
    ("1/2", "½"),
    ("-5", "–5"),
    ("42", "42。"),
    (r"(5,\infty)", "x>5"),
    (r"(-\infty,3]", r"x \le 3"),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"),
    ("3", "x=3"),
    (r"\pm 3", "3,-3"),
    (r"1 \pm \sqrt{2}", r"1+\sqrt2, 1-\sqrt2"),
    ("y=2x+3", "2x-y+3=0"),
    ("y=2x+3", "2x+3"),
    ("2x+3", "y=2x+3"),
    ("y = 2x+3", "f(x) = 2x+3"),
    ("5 m", r"5 \text{ m}"),
    (r"5 \text{ m}", "5m"),
    (r"5 \text{ m}", "5"),
    ("42%", "42"),
    ("0.42", r"42\%"),
    (r"\$5,000", "5000"),
    (r"\frac{3}{4}\pi", r"3/4\pi"),
    (r"\frac{1}{2}x", "1/2x"),
    (r"\sqrt{12}", r"2\sqrt3"),
    ("x^{10}", "x^10"),
    (r"\text{(C)}", "C"),
    (r"\text{(C)}", "(C)"),
    ("C", r"\text{C}"),
    (r"\log_2 8", "3"),
    (r"e^{i\pi}", "-1"),
    (r"\frac{\sqrt{2}+\sqrt{6}}{4}", r"\cos 15^\circ"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    (r"\tan x", r"\frac{\sin x}{\cos x}"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    ("|x|", "|x|"),
    ("2^{2010}", "4^{1005}"),
    (r"\frac{4! \cdot 48!}{52!}", r"\frac{24 \cdot 48!}{52!}"),
    ("8.224e-19", r"8.224 \times 10^{-19}"),
    (r"\int_0^1 x dx", "1/2"),
    (r"\sum_{k=1}^{3} k", "6"),
    ("[1,2)", r"\left[1,2\right)"),
    (r"\{1,2,3\}", "1,2,3"),
    ("1,2,3", r"\{3,2,1\}"),
    ("x=2, y=3", "(2,3)"),
    ("(2,3)", "x=2, y=3"),
    ("6", r"\text{six} = 6"),
    (r"12 \text{ inches}", "12 in"),
    ("12", "12 square units"),
    (r"\frac{1}{2} \text{ hour}", "0.5"),
    (r"3\frac{1}{2}", "7/2"),
    ("0.5", ".5"),
    ("100,000", "10^5"),
    ("1{,}000", "1000"),
    ("even", r"\text{Even}"),
    (r"\text{Monday}", "Monday"),
    ("x^2+1", "x^2 + 1."),
    ("y''", r"y^{\prime\prime}"),
    ("(1,2), (3,4)", "(3,4), (1,2)"),
    (r"\frac{a}{b}", "a/b"),
    (r"\frac{x+1}{2}", "(x+1)/2"),
    (r"\ln 2", r"\log_e 2"),
    (r"60^\circ", "60"),
    (r"\angle A = 60^\circ", "60"),
    ("(0, 1) ∪ (2, ∞)", r"(0,1)\cup(2,\infty)"),
    (r"2\cdot 3^x", "2*3^x"),
    ("sqrt(3)/2", r"\frac{\sqrt3}{2}"),
    ("pi/4", r"\frac{\pi}{4}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{1}{\sqrt 2}", r"\frac{\sqrt2}{2}"),
    ("x=5", "5"),
    ("A", r"\mathbf{A}"),
    (r"\text{Evelyn}", "Evelyn"),
    ("0", r"\sin(\pi)"),
    ("k=3", "3"),
    (r"\frac{2}{3}", "0.666667"),
    (r"6 \pm 2i", "6+2i, 6-2i"),
    ("x^3+3x-6", "-6+x^3+3x"),
    ("3:2", "3 : 2"),
    ("f^{-1}(x)", "f^{-1}(x)"),
    (r"\sqrt[3]{-8}", "-2"),
    ("4^{1/2}", "2"),
    (r"11\sqrt{2}", r"11 \sqrt {2}"),
    ("1,2", r"1 \text{ and } 2"),
    ("1 and 2", "1,2"),
    (r"\left\{\frac12, 3\right\}", "0.5, 3"),
    (r"[-2,\infty)", r"[-2, +\infty)"),
    (r"\lfloor 2.5 \rfloor", "2"),
    (r"x \ne 3", r"(-\infty,3)\cup(3,\infty)"),
    (r"\mathbb{R}", "ℝ"),
    (r"2\mathbf{i}+3\mathbf{j}", r"3\mathbf{j}+2\mathbf{i}"),
    ("x < 3", "3 > x"),
    ("5", "$5$"),
    ("5", r"\(5\)"),
    ("(x-1)(x+2)", "(x+2)(x-1)"),
    (r"10\%", "10%"),
    (r"1.5 \times 10^{3}", "1500"),
    ("33.3", "33.3"),
    (r"7 \text{ cm}", r"7\,\mathrm{cm}"),
    ("(2x+1)(x-3)", "2x^2-5x-3"),
    (r"\cot x", r"\frac{1}{\tan x}"),
    (r"\frac{\pi}{6}+2\pi k", r"2k\pi+\frac{\pi}{6}"),
    ("1000000", "1,000,000"),
    ("1 000 000", "1000000"),
    (r"\frac{1}{x+1}", "(x+1)^{-1}"),
    ("2^{n}-1", "-1+2^n"),
    ("n!", r"n \cdot (n-1)!"),
    (r"\{x \mid x>0\}", r"\{x \mid x > 0\}"),
    ("x=1 or x=2", "x=2 or x=1"),
    ("x=1,2", "x = 2, 1"),
    (r"\sqrt{x^2+1}", "(x^2+1)^{1/2}"),
    (r"(\frac{1}{2},3)", "(0.5,3)"),
    ("6", "2(3)"),
    ("2x+2", "(x+1)(2)"),
    (r"6\pi", r"3\pi(2)"),
    ("3x^2", "x^2(3)"),
    ("5", "f(0) = 5"),
    ("f(0.5) + 1", r"1 + f(\frac{1}{2})"),
    (r"2\pi r", r"\pi r(2)"),
    (r"\frac{2\pi r}{3}", r"\frac{\pi r(2)}{3}"),
    (r"\frac{3bh}{2}", r"\frac12 bh(3)"),
    (r"\frac{k}{2}", "k(1/2)"),
    ("-3x", "x(-3)"),
    ("2a_1", "a_1(2)"),
    (r"2\alpha", r"\alpha(2)"),
    ("2x", "x[2]"),
    (r"\frac{5}{t}", "t^{-1}(5)"),
    ("y = 2x", "y = x(2)"),
    (r"I(0)e^{-\frac{t}{RC}}", "I(0)e^{-t/(RC)}"),
    (r"\gcd(m,n)", r"\operatorname{gcd}(m, n)"),
    (r"\gcd(m,n)", r"\gcd(n,m)"),
    (r"\frac{mn}{\gcd(m,n)}", r"\frac{nm}{\gcd(m,n)}"),
    (r"\gcd(m,n)+1", r"1+\gcd(m,n)"),
    (r"2\gcd(m,n)", r"\gcd(m,n)\cdot 2"),
    (r"\lcm(2a,b)", r"\lcm(b,a\cdot 2)"),
    (r"\gcd(12,18)", "6"),
    (r"\max(x,50)", r"\max(50,x)"),
    (r"\sqrt{(x-20)^2}", "|20-x|"),
    (r"\sqrt{ab}", r"\sqrt{a}\sqrt{b}"),
    (r"\sqrt{4 \pi G \rho_{0} r_{0}^{2}}", r"2 r_0 \sqrt{\pi G \rho_0}"),
    (r"\sqrt{(x-1)(x-2)}", r"\sqrt{x-1}\sqrt{x-2}"),
    (r"\sqrt{x^2+1}-x", r"\frac{1}{\sqrt{x^2+1}+x}"),
    (r"\lfloor n/20\rfloor", r"\lfloor \frac{n}{20} \rfloor"),
    (r"x+\cosh^2 x-\sinh^2 x", "x+1"),
    (r"\frac{(n+1)!}{n!}", "n+1"),
    ("(x+i)(x-i)", "x^2+1"),
    *((f"({letter})", letter.lower()) for letter in "ABCDE"),
    ("C", "c"),
    (r"\text{(B)}", "(b)"),
    ("f(x) = 2x", "g(x) = 2x"),
    ("5", r"5\,\mathrm{m/s^2}"),
    ("42", r"\text{42 cm}"),
    ("5", "5 km/h"),
    ("5", "5 USD"),
    ("5", "5°C"),
    ("5", "€5"),
    (r"\frac{3}{2}", r"{3 \over 2}"),
    (r"x+\frac{a+1}{2}", r"x+{a+1 \over 2}"),
    ("10", r"{5 \choose 2}"),
    (r"1\frac{1}{2}", r"1{1 \over 2}"),
    (r"\frac{1}{2}", r"\left(1\over 2\right)"),
    (r"3\left(\frac{x+1}{2}\right)", r"3\left(x+1\over 2\right)"),
    (r"\begin{pmatrix}1/2\\3\end{pmatrix}", r"\begin{pmatrix}1\over 2\\3\end{pmatrix}"),
    (
        r"\begin{pmatrix}1&2/3\\3&x/4\end{pmatrix}",
        r"\begin{array}{cc}1&2\over 3\\3&{x\over 4}\end{array}",
    ),
    (r"\begin{pmatrix}1/2&3\end{pmatrix}", r"\begin{array}{cc}1\over 2&3\end{array}"),
    (r"\sqrt{1.5}", r"\sqrt{3 \over 2}"),
    (r"(-\infty,\infty)", r"\mathbb{R}"),
    (r"\mathbb{R}", r"x \in (-\infty,\infty)"),
    ("7:30 p.m.", "7:30 pm"),
    (r"7:30 \text{ p.m.}", "7:30 PM"),
    (r"5\text{ km/h}", r"5 \text{ kilometers per hour}"),
    (r"5\,\mathrm{m/s^2}", r"5\,\mathrm{m}\,\mathrm{s}^{-2}"),
    (r"5\text{ cm}^2", r"5\text{ square centimeters}"),
    (r"5\text{ cm}^2", r"5\text{ cm squared}"),
    (r"5\text{ mph}", r"5\text{ mi/h}"),
    (r"75^\circ\text{C}", "75 degrees Celsius"),
    ("75 °F", "75°"),
    ("5 USD", r"\$5"),
    ("5 dollars", "$5"),
    ("5 €", r"5\text{ euros}"),
    (r"(\$1, \$2)", "(1, 2)"),
]

DIFFERENT = [
    (
        r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
        r"\begin{pmatrix} -7 \\ 15 \\ 6 \end{pmatrix}",
    ),
    (r"\begin{pmatrix} 1&2 \\ 3&4 \end{pmatrix}", r"\begin{pmatrix} 1&3\\2&4 \end{pmatrix}"),
    (r"\begin{pmatrix} 0&0 \\ 0&0 \end{pmatrix}", r"\begin{pmatrix} 0&2\\0&0 \end{pmatrix}"),
    (r"\frac{4! \cdot 48!}{52!}", r"\frac{48!}{52!}"),
    ("8.224e-19", r"5 \times 10^{-20}"),
    ("8.224e-19", r"8.264 \times 10^{-19}"),
    (r"2.88 \times 10^{-19}", r"2.88 \times 10^{-17}"),
    (r"m_{p} c^{2}(\gamma^{2}-1)", r"m_{p} c^{2}(\gamma^{2}-3)"),
    ("2", "3 1/2"),
    ("3 1/2", "2"),
    ("31/2", "3 1/2"),
    (r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}}", "2"),
    (r"2007 + \frac\pi 2", "2"),
    (r"0.\overline{3}", "0"),
    ("7:30 p.m.", "7"),
    (r"10,\!080", r"080,\!10"),
    ("2", "2t"),
    (r"\pi r^2", r"\pi r^2 h"),
    (r"\frac{1}{m}", r"\frac{1}{m}t"),
    (r"\frac{1}{m}t", r"\frac{1}{m}"),
    ("2t", "2"),
    ("1", "-1"),
    ("x", "|x|"),
    ("|x|", "x"),
    (r"\sqrt{x^2}", "x"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("0.1", "0.10000001"),
    ("123456789012345678901234", "123456789012345678901235"),
    ("2^{100}-1", "2^{100}+1"),
    ("0", "0.0000001"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("x/0", "y/0"),
    ("(0,12.5)", r"0\le x<12.5"),
    ("42", "42 or 43"),
    ("5", "5 or more"),
    ("5", "not 5"),
    ("1,2", "1,3"),
    ("12 cm", "12 m"),
    ("I_0", "i"),
    ("x", "x'"),
    ("y=2x+3", "y=2x-3"),
    ("x=2, y=3", "x=3, y=2"),
    (r"\text{Monday}", r"\text{Tuesday}"),
    ("2", "2, 3"),
    (r"\frac{r}{R}", "1"),
    ("10", "1010"),
    ("42", "42 hours 30 minutes"),
    ("2", "x=2,y=3"),
    ("4", "x^2+y^2 = 5"),
    ("x^2+y^2=4", "4"),
    (r"\infty", "5"),
    (r"\infty", r"-\infty"),
    ("3", "3i"),
    ("e", "2.718"),
    ("100", "1,00"),
    ("12", "1 2"),
    ("30", "3 0"),
    ("f(x)+1", "f(x)+2"),
    (r"\Gamma(5)", r"\Gamma(6)"),
    ("x>3", "x>4"),
    ("x>3", r"x\ge 3"),
    ("x>3", "y>3"),
    (r"\sum_{k=1}^{n} k", r"\sum_{k=2}^{n} k"),
    ("10^{400}", "10^{401}"),
    ("1", r"1 \text{ million}"),
    ("5", r"\sqrt{5}"),
    ("2", "2^{2}"),
    ("-2", "2"),
    ("0.5", "50"),
    ("1/3", "0.33"),
    ("1,2,2", "1,1,2"),
    ("A", "B"),
    ("ABCD", "DCBA"),
    ("3", r"3 \text{ or } 4"),
    ("1/2", r"1\2"),
    (r"\{1,2\}", "(1,2)"),
    (r"\{x \mid x>0\}", r"\{x \mid x>1\}"),
    ("3:2", "2:3"),
    ("x=1,2", "x=1,3"),
    ("2", r"\frac{4}{2}+\infty"),
    ("x+1", r"x+1+\epsilon"),
    ("1.23456789", "1.23456780"),
    ("1", "0.999999999999999999"),
    ("f(0)", "0"),
    ("V(0)", "W(0)"),
    ("P(1)-P(0)", "P(2)-P(1)"),
    (r"\Phi(1.5)-\Phi(0.5)", r"\Phi(2)-\Phi(1)"),
    (r"\Gamma(0)", r"\beta(0)"),
    ("F'(0)", "0"),
    ("f^{-1}(0)", "0"),
    ("f^{(2)}(0)", "0"),
    ("x_1(0)", "0"),
    ("i(0)", "0"),
    (r"I(0)e^{-\frac{t}{RC}}", "0"),
    (r"I(0)e^{-\frac{t}{RC}}", r"I(0)e^{-\frac{2t}{RC}}"),
    ("f(-1)", "-f(1)"),
    ("0", "f(0)"),
    ("f(2)", "2f(1)"),
    ("f(2)", "2f"),
    ("P", "P(2)-P(1)"),
    ("2f", "f(3)"),
    (r"\max(x,50)", "50"),
    (r"\min(x,50)", "x"),
    (r"\lfloor n/20\rfloor", r"\lfloor n/30\rfloor"),
    (r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor\sqrt{n-2}\rfloor"),
    (r"\lfloor x\rfloor", r"\lceil x\rceil - 1"),
    (r"\lfloor x+0.5\rfloor", r"\lfloor x+0.4\rfloor"),
    (r"\arccos(\cos(x/20))", "x/20"),
    ("y = |x-100|", "y = 100-x"),
    ("1+e^{x-100}", "1"),
    ("1+e^{-1000x}", "1"),
    (r"\sqrt{x-5}", r"\sqrt{5-x}"),
    (r"\gcd(m,n)", "1"),
    (r"\gcd(m,n)", r"\gcd(m,n+1)"),
    (r"\lcm(m,n)", "mn"),
    (r"\lcm(m,n)", r"\gcd(m,n)"),
    ("MR=SRMC", "R=SRMC"),
    ("MR=SRMC", "XYZ=SRMC"),
    ("SRAC=LRAC", "ABC=LRAC"),
    ("r", "R"),
    ("K", "k"),
    ("k", "K"),
    ("a", "A"),
    ("(r,s)", "(R,s)"),
    ("(A,B)", "(a,b)"),
    ("N=n", "N=N"),
    ("f(n)=n^2", "f(x)=n^2"),
    ("7:30 p.m.", "8:30 pm"),
    ("7:30 p.m.", "7:30 a.m."),
    (r"7:30 \text{ p.m.}", "7:30 AM"),
    (r"5\,\mathrm{m/s^2}", r"5\,\mathrm{m/s^3}"),
    (r"\text{42 cm}", r"\text{42 m}"),
    ("5", r"\text{5 or more}"),
    ("5", r"\text{5 million}"),
    (r"\frac{3}{2}", r"{2 \over 3}"),
    (r"\mathbb{R}", r"(0,\infty)"),
    ("5", "5C"),
    (r"\text{4 even}", r"\text{4 odd}"),
    (r"\text{10 red}", r"\text{10 blue}"),
    (r"5\,\mathrm{m/s^2}", r"5\,\mathrm{m/s}"),
    ("5 cm^2", "5 cm"),
    ("5 km", "5 km/h"),
]


UNITS = [
    *("5 km", "5 km^2", "5 km/h", "5 mi/h", "5 km/s", "5 kg", r"5\text{ kg m/s}", "5 Hz", "5 kHz"),
    *(r"5^\circ C", r"5^\circ F", "5 USD", "5 EUR", "£5", "5 cents", r"5\%", "5 min", "5 kelvin"),
]
"""The same number with units that all differ."""

NO_UNITS = [
    *(
        "squared",
        "cubed",
        "factorial",
        "fourths",
        "thirds",
        "pi",
        "x",
        "i",
        "n",
        "e",
        "C",
        "F",
        "K",
    ),
    *("V", "x y", "cm x", "red", "even", "odd", "or so", "remainder", "plus 1", "mod 7"),
]
"""Words and letters after a number which may change its value."""


def formulas_of_one_side() -> Iterator[tuple[str, str]]:
    """Yields functions with a corner or a step at a random number, and the formula of one side."""
    rng = random.Random(49)
    for digits in (1, 2, 3, 4, 5, 7, 12, 25):
        a = rng.randint(10 ** (digits - 1), 10**digits)
        yield f"|x-{a}|", f"{a}-x"
        yield f"|x-{a}|", f"x-{a}"
        yield f"|x+{a}|", f"x+{a}"
        yield rf"\max(x,{a})", f"{a}"
        yield rf"\max(x,{a})", "x"
        yield rf"\min(x,{a})", "x"
        yield rf"\sqrt{{(x-{a})^2}}", f"{a}-x"
        yield rf"\sqrt{{(x+{a})^2}}", f"x+{a}"
        yield rf"\lfloor n/{a}\rfloor", rf"\lfloor n/{2 * a + 1}\rfloor"
        yield rf"|x-y-{a}|", f"{a}-x+y"
        yield f"f({a})", f"{a}f"
        yield rf"\gcd({a}m,n)", "1"


HOSTILE = [
    "9^{9^{9^{9}}}",
    "10^{10^{10}}!",
    r"\binom{10^9}{5 \cdot 10^8}",
    "9^" * 300 + "9",
    "-" * 900 + "1",
    "|" * 500,
    r"\frac" * 200,
    r"\sqrt" * 300 + "2",
    r"\sin" * 200 + "x",
    r"\begin{pmatrix}" * 3,
    "e^{e^{e^{e^{e}}}}",
    r"\frac{1}{x-x}",
    r"\log_1 2",
    "1_{" * 100,
    "½" * 100,
    "\x00",
    "\ud800",
    "()",
    "==",
    ",",
]


def accepts(reference: str, answer: str, task: MathTask = TASK) -> bool:
    return task.verify({"answer": reference}, rf"\boxed{{{answer}}}").status == "ok"


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_another_spelling_of_the_reference_is_right(reference: str, answer: str) -> None:
    assert accepts(reference, answer)


@pytest.mark.parametrize(("reference", "answer"), [*DIFFERENT, *formulas_of_one_side()])
def test_another_value_is_wrong(reference: str, answer: str) -> None:
    assert not accepts(reference, answer)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_may_be_missing_but_not_another(unit: str) -> None:
    assert [other for other in UNITS if accepts(unit, other)] == [unit]
    assert accepts(unit, "5")
    assert accepts("5", unit)


@pytest.mark.parametrize("words", NO_UNITS)
def test_a_text_with_a_number_and_words_that_are_no_units_is_no_number(words: str) -> None:
    text = rf"\text{{5 {words}}}"
    assert not accepts("5", text)
    assert not accepts(text, "5")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_equals_no_reference_in_either_direction(text: str) -> None:
    for reference in ("42", "x^2+1", "(0,1]", r"\{1,2\}", "y=2x", "x>3", r"\frac13"):
        assert not accepts(reference, text)
        assert not accepts(text, reference)


TOWERS = [
    *(rf"\{name}(x^{{x^x}})" for name in ("sin", "cos", "tan", "cosh", "tanh", "Gamma", "exp")),
    *(r"\cos(n^{n^n})", r"\sin(e^{x^x})", r"\cos(ix^{x^x})", "(x^{x^x})!", "i^{x^{x^x}}"),
    r"|x|+\sum_{i=1}^{35}\cos((x+i)^{x^4})",
]


@pytest.mark.parametrize("text", TOWERS)
def test_large_values_take_few_and_short_operations(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of mpmath grows with the bits of a value before and behind its point."""
    bits: list[float] = []
    functions = math_equality._FUNCTIONS
    for kind in (sympy.sin, sympy.cos, sympy.tan, sympy.cosh, sympy.tanh, sympy.gamma):

        def count(value: Any, function: Any = functions[kind]) -> Any:
            result = function(value)
            bits.append(float(mpmath.log(1 + abs(value), 2)))
            return result

        monkeypatch.setitem(functions, kind, count)
    for reference in ("x^2", "2^n", f"{text}+(x+1)^2-x^2-2x-1"):
        accepts(reference, text)
    assert max(bits, default=0) < 1_000
    assert len(bits) < math_equality._MAX_EVALUATIONS


def test_the_order_of_a_list_matters_where_the_answer_key_says_so() -> None:
    ordered = MathTask(ordered=True)
    for reference, answer in (("1, 2", "2, 1"), ("1, 2", r"2 \text{ and } 1"), ("x=1,x=2", "2,1")):
        assert accepts(reference, answer)
        assert not accepts(reference, answer, ordered)
        assert accepts(reference, reference.replace(",", ", "), ordered)
    assert accepts(r"\{1, 2\}", r"\{2, 1\}", ordered)


def test_an_empty_box_does_not_hide_the_answer_before_it() -> None:
    verdict = TASK.verify({"answer": "42"}, r"\boxed{42}. I put it in \boxed{}.")
    assert (verdict.status, verdict.answer) == ("ok", "42")
    assert TASK.verify({"answer": "42"}, r"\boxed{}").status == "no_answer"


@pytest.mark.parametrize("response", [r"\boxed 42", r"so $\boxed 42$.", r"\boxed42", r"\fbox 42"])
def test_a_box_without_braces_has_the_number_after_it(response: str) -> None:
    assert TASK.verify({"answer": "42"}, response).status == "ok"


def test_blanks_between_digits_are_part_of_a_vote() -> None:
    assert TASK.normalise("3 1/2") == TASK.normalise("7/2") != TASK.normalise("31/2")


def test_a_reference_that_cannot_be_read_is_explained() -> None:
    assert TASK.explain_reference({"answer": r"\frac{1}{2}"}) is None
    assert TASK.explain_reference({"answer": ["1", r"\text{even}"]}) is None
    reason = TASK.explain_reference({"answer": ["1", r"\foo{2} + 1"]})
    assert reason == r"\foo{2} + 1 cannot be read as mathematics"


PIECES = [
    *"0123456789xyab+-/^_!.,;() []|=<>{}&²½−",
    *(r"\\", r"\,", r"\!", r"\ ", r"\{", r"\}", r"\frac", r"\sqrt", r"\pi", r"\infty"),
    *(r"\left(", r"\right)", r"\begin{pmatrix}", r"\end{pmatrix}", r"\text{cm}"),
]


SPACED = [
    r"\begin{pmatrix} -7 & 16 \\ 5 & \frac{1}{3} \end{pmatrix}",
    r"\left( -\infty, \frac{3}{2} \right] \cup [4, 9)",
    r"\{ 1, -2, \sqrt{3} \}",
    "y = -2x^2 + 3(x - 1)",
    r"\frac{\sqrt{3} + 1}{2}, -\frac{1}{2}",
]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SPACED), st.data())
def test_spacing_between_tokens_changes_no_reading(text: str, data: st.DataObject) -> None:
    blanks = st.sampled_from(["", " ", r"\,", r"\;", r"\!", r"\ ", "~", r"\quad "])
    spaced = "".join(
        token
        + (
            data.draw(blanks)
            if token in [r"+", r"-", r"=", r"(", r")", r"[", r"]", r",", r"&", r"\\", r"\{"]
            else ""
        )
        for token in split_tokens(text)
    )
    assert read_answer(normalise_tokens(spaced)) == read_answer(normalise_tokens(text))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
def test_any_text_has_a_reading_and_a_verdict(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(split_tokens(text)) == text
    assert read_answer(normalise_tokens(text)) == read_answer(normalise_tokens(text))
    assert TASK.verify({"answer": "unlike any"}, rf"\boxed{{{text}}}").reward == 0
