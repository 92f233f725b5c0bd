r"""Hostile and odd responses for both tasks, each with the reward it must get.

The cases are built by code, because a megabyte of brackets is one line of it. They are
deterministic, and their names are unique.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    task: str
    payload: dict[str, Any]
    response: str
    reward: float
    batch: str = "fast"
    """`slow` for a response that may miss its deadline or end its process; `fast` otherwise."""


COUNTDOWN = {"nums": [3, 4, 7], "target": 84}
MATH = {"problem": "What is $6 \\cdot 7$?", "answer": "42"}
GOOD = {
    "countdown": "<think>easy</think><answer>3 * 4 * 7</answer>",
    "math": r"<think>easy</think> so it is \boxed{41 + 1}",
}
"""Right answers, which are put between the hostile ones."""


def corpus() -> list[Case]:
    cases = [*_countdown(), *_math()]
    assert len({case.name for case in cases}) == len(cases)
    return cases


# ---- countdown ----------------------------------------------------------------------------------

_WRONG_EXPRESSIONS = {
    # Python that is outside the grammar.
    "power": "3**4 * 7",
    "power-of-right": "3*4*7**1",
    "tower": "9**9**9**9",
    "tower-long": "**".join(["9"] * 100),
    "caret": "3^4*7",
    "floor-division": "84//1",
    "floor-of-right": "3*4*7//1",
    "modulo": "3*4%7",
    "matrix-product": "3@4@7",
    "shift": "3<<4<<7",
    "factorial": "3!*4*7",
    "giant-factorial": "999999999!",
    "import": "__import__('os').system('kill -9 -1')",
    "import-in-sum": "3*4*7+0*__import__('os').getpid()",
    "eval": "eval('3*4*7')",
    "exec": "exec('while True: pass')",
    "exit": "exit()",
    "lambda": "(lambda: (yield))()",
    "endless-recursion": "(lambda f: f(f))(lambda f: f(f))",
    "endless-loop": "[0 for _ in iter(int, 1)]",
    "comprehension": "sum([3*4*7])",
    "class-walk": "().__class__.__bases__[0].__subclasses__()",
    "memory": "'a'*10**10",
    "walrus": "(x:=84)",
    "conditional": "84 if 3*4*7 else 0",
    "comparison": "3*4*7==84",
    "equation": "3*4*7=84",
    "comma": "3*4*7,84",
    "tuple": "(3,4,7)",
    "list": "[3*4*7]",
    "string": "'3*4*7'",
    "f-string": "f'{3*4*7}'",
    "backtick": "`3*4*7`",
    "shell": "$((3*4*7))",
    "comment": "3*4*7 # right",
    "assignment": "x=3*4*7",
    "semicolon": "3*4*7;",
    "unary-minus": "-3*4*7",
    "unary-plus": "+3*4*7",
    "double-minus": "3--4*7",
    "float": "3.0*4*7",
    "exponent": "3e0*4*7",
    "hexadecimal": "0x3*4*7",
    "underscore": "3_0*4*7",
    "leading-zero": "03*4*7",
    "complex": "3j*4j*-7",
    # Other alphabets.
    "arabic-digits": "\u0663*\u0664*\u0667",
    "fullwidth-digits": "\uff13*\uff14*\uff17",
    "superscript": "3*4*7\u00b2",
    "circled-digits": "\u2462*4*7",
    "bold-digits": "\U0001d7d1*4*7",
    "roman-numeral": "\u2162*4*7",
    "devanagari": "\u0969*4*7",
    "times-sign": "3\u00d74\u00d77",
    "division-sign": "3\u00f74",
    "minus-sign": "3\u22124",
    "fullwidth-parentheses": "\uff083*4\uff09*7",
    "no-break-space": "3\u00a0*4*7",
    "zero-width-space": "3\u200b*4*7",
    "byte-order-mark": "\ufeff3*4*7",
    "right-to-left": "\u202e7*4*3",
    "emoji": "3\ufe0f\u20e3*4*7",
    "combining": "3\u0301*4*7",
    "replacement": "3\ufffd*4*7",
    # Bytes.
    "nul": "\x00",
    "nul-inside": "3*4\x00*7",
    "nul-after": "3*4*7\x00",
    "escape": "\x1b[31m3*4*7\x1b[0m",
    "backspace": "3*4*8\b7",
    "form-feed": "3*4*7\f+0",
    "vertical-tab": "3\v*4*7",
    "delete": "3\x7f*4*7",
    # Not quite arithmetic.
    "division-by-zero": "7/(4-3-1)",
    "division-by-zero-right-numbers": "7/(3-3)",
    "zero-numbers": "0",
    "unmatched-open": "(3*4*7",
    "unmatched-close": "3*4*7)",
    "empty-parentheses": "()*3*4*7",
    "implicit-product": "3(4)(7)",
    "two-operands": "3 4 7",
    "trailing-operator": "3*4*7*",
    "leading-operator": "*3*4*7",
    "only-operator": "*",
    "braces": "{3*4}*7",
    "ellipsis": "3*4*...",
    "words": "three times four times seven",
    "target-itself": "84",
    "twice-a-number": "3*4*7+3-3",
    "one-missing": "3*4",
    "one-too-many": "3*4*7*1",
    "digits-joined": "34*7",
    "wrong-value": "3+4+7",
    "almost": "3*4+7",
    "entity": "3&#42;4*7",
    "latex": "3 \\times 4 \\times 7",
    "boxed": "\\boxed{3*4*7}",
    "json": '{"answer": "3*4*7"}',
    "sql": "3*4*7'; DROP TABLE prompt; --",
    "format": "%s%s%n",
    "path": "../../etc/passwd",
    "yaml": "!!python/object/apply:os.system ['true']",
    "pickle": "cos\nsystem\n(S'true'\ntR.",
    "nan": "nan",
    "infinity": "inf",
    "none": "None",
    "true": "True*84",
}

_RIGHT_EXPRESSIONS = {
    "plain": "3*4*7",
    "blanks": "  3 * 4\t*\n7 \r\n",
    "order": "7*4*3",
    "parentheses": "((((3))*(4))*((7)))",
    "many-parentheses": "(" * 200 + "3*4*7" + ")" * 200,
}


def _countdown() -> Iterator[Case]:
    for name, text in _WRONG_EXPRESSIONS.items():
        yield _count(name, f"<answer>{text}</answer>", 0)
    for name, text in _RIGHT_EXPRESSIONS.items():
        yield _count(f"right-{name}", f"<think>...</think><answer>{text}</answer>", 1)
    yield from _countdown_sizes()
    yield from _countdown_tags()


def _countdown_sizes() -> Iterator[Case]:
    for exponent in (2, 3, 4, 5):
        n = 10**exponent
        yield _count(f"digits-{n}", f"<answer>{'9' * n}</answer>", 0)
        yield _count(f"open-{n}", f"<answer>{'(' * n}</answer>", 0)
        # 100 pairs still fit in an answer.
        nested = f"<answer>{'(' * n}3*4*7{')' * n}</answer>"
        yield _count(f"nested-{n}", nested, 1 if n == 100 else 0)
        yield _count(f"minuses-{n}", f"<answer>{'-' * n}84</answer>", 0)
        yield _count(f"product-{n}", f"<answer>{'*'.join('9' * n)}</answer>", 0)
        yield _count(f"blanks-{n}", f"<answer>{' ' * n}3*4*7</answer>", 1)
        yield _count(f"open-tags-{n}", "<answer>" * n, 0)
        yield _count(f"close-tags-{n}", "</answer>" * n, 0)
        yield _count(f"tag-pairs-{n}", "<answer>3*4*7</answer>" * min(n, 9_000), 1)
    yield _count("megabyte", "<answer>" + "3*4*7+" * 170_000 + "0</answer>", 0)
    yield _count("megabyte-of-text", "x" * 1_000_000 + GOOD["countdown"], 0)
    yield _count("long-text-then-right", "x" * 100_000 + GOOD["countdown"], 1)
    yield _count("megabyte-of-nul", "\x00" * 1_000_000, 0)


def _countdown_tags() -> Iterator[Case]:
    right, wrong = "<answer>3*4*7</answer>", "<answer>3+4+7</answer>"
    yield _count("tags-last-is-right", wrong + right, 1)
    yield _count("tags-last-is-wrong", right + wrong, 0)
    yield _count("tags-last-is-open", right + "<answer>3+4", 1)
    yield _count("tags-none", "3*4*7", 0)
    yield _count("tags-upper-case", "<ANSWER>3*4*7</ANSWER>", 0)
    yield _count("tags-reversed", "</answer>3*4*7<answer>", 0)
    yield _count("tags-empty", "<answer></answer>", 0)
    yield _count("tags-blank", "<answer> \n </answer>", 0)
    yield _count("tags-nested", "<answer><answer>3*4*7</answer></answer>", 0)
    yield _count("tags-opened-twice", "<answer><answer>3*4*7</answer>", 1)
    yield _count("tags-blank-in-name", "<answer >3*4*7</answer >", 0)
    yield _count("tags-in-think", f"<think>{right}</think> no idea", 1)
    yield _count("tags-two-expressions", "<answer>3*4*7 or 3+4+7</answer>", 0)
    yield _count("empty", "", 0)
    yield _count("blank", " ", 0)
    yield _count("nothing-but-nul", "\x00", 0)


def _count(name: str, response: str, reward: float) -> Case:
    return Case(f"countdown-{name}", "countdown", COUNTDOWN, response, reward)


# ---- mathematics --------------------------------------------------------------------------------

_WRONG_BOXES = {
    # Code.
    "import": '__import__("os").system("kill -9 -1")',
    "eval": 'eval("42")',
    "exit": "exit()",
    "lambda": "lambda: 42",
    "sympify": "S('42')",
    "class-walk": "().__class__.__bases__[0].__subclasses__()",
    "factorial-call": "factorial(10**9)",
    "python-none": "None",
    "input": r"\input{/etc/passwd}",
    "write18": r"\immediate\write18{kill -9 -1}",
    "def": r"\def\a{\a\a}\a",
    "newcommand": r"\newcommand{\x}{\x\x}\x",
    "loop": r"\loop\iftrue\repeat",
    "csname": r"\csname end\endcsname",
    "href": r"\href{http://example.com}{41}",
    # Not a value.
    "division-by-zero": r"\frac{42}{0}",
    "zero-by-zero": r"\frac{0}{0}",
    "slash-zero": "42/0",
    "infinity": r"\infty",
    "minus-infinity": r"-\infty",
    "infinity-minus-infinity": r"\infty - \infty",
    "log-zero": r"\log(0)",
    "zero-to-minus-one": "0^{-1}",
    "tan-pole": r"\tan(\frac{\pi}{2})",
    "nan": "nan",
    "empty-set": r"\emptyset",
    "reals": r"\mathbb{R}",
    "undefined": r"\text{undefined}",
    "words": r"\text{forty-two}",
    "question-mark": "?",
    "dots": r"\ldots",
    "blank": " ",
    "tilde": "~",
    "only-operator": "+",
    "only-backslash": "\\",
    "lone-dollar": "$",
    "empty-frac": r"\frac{}{}",
    "half-frac": r"\frac{42}",
    "bare-frac": r"\frac",
    "bare-sqrt": r"\sqrt",
    "unknown-command": r"\foo{41}",
    "unknown-environment": r"\begin{foo}42\end{foo}",
    "open-environment": r"\begin{matrix}42",
    "left-without-right": r"\left(41",
    "ampersands": "&&&&",
    "newlines": r"\\\\\\\\",
    "hash": "#1",
    "subscripts": "x_{x_{x_{x}}}",
    "double-subscript": "x_1_2",
    "double-superscript": "x^1^2",
    # Wrong values that look right.
    "other-number": "41",
    "other-number-close": "42.001",
    "negative": "-42",
    "sum-that-is-not": "41+2",
    "false-equation": "7=42",
    "false-chain": "x=41=42",
    "false-sum": "6+7=42",
    "set-with-more": r"\{41, 42\}",
    "two-answers": "41, 42",
    "two-answers-or": r"41 \text{ or } 42",
    "all-answers": ", ".join(map(str, range(100))),
    "interval": "[41, 43]",
    "open-interval": "(41, 43)",
    "inequality": "x > 41",
    "not-equal": r"x \neq 42",
    "range-of-all": r"x \in \mathbb{R}",
    "plus-minus": r"42 \pm 42",
    "variable": "x",
    "times-variable": "42x",
    "percent-of": r"4100\%",
    "thousands": "42,000",
    "digits-apart": "4 2 0",
    "exponent-form": r"42 \times 10^1",
    "matrix": r"\begin{pmatrix}42 & 0\\0 & 42\end{pmatrix}",
    "vector": r"\langle 42, 42 \rangle",
    "binomial": r"\binom{42}{2}",
    "complex": "42i",
    "modulus": r"42 \bmod 5",
    "floor": r"\lfloor 41.5 \rfloor",
    "limit": r"\lim_{x \to 0} \frac{1}{x}",
    "derivative": r"\frac{d}{dx} 42",
    "sum": r"\sum_{i=1}^{42} i",
    "integral": r"\int_0^{42} x dx",
    # Other alphabets and bytes.
    "arabic-digits": "\u0664\u0662",
    "superscript": "4\u00b2",
    "roman-numeral": "\u2169",
    "emoji": "4\ufe0f\u20e32\ufe0f\u20e3",
    "chinese": "\u56db\u5341\u4e8c",
    "nul": "\x00",
    "nul-after": "42\x00",
    "nul-inside": "4\x002",
    "escape": "\x1b[31m42\x1b[0m",
    "zero-width": "4\u200b2",
    "right-to-left": "\u202e24",
    "replacement": "\ufffd",
    "private-use": "\ue000",
    "noncharacter": "\uffff",
    "astral": "\U0010ffff",
    "byte-order-mark": "\ufeff41",
}

_RIGHT_BOXES = {
    "number": "42",
    "decimal": "42.0",
    "fraction": r"\frac{84}{2}",
    "dfrac": r"\dfrac{84}{2}",
    "slash": "84/2",
    "product": r"6 \cdot 7",
    "times": r"6 \times 7",
    "sum": "40 + 2",
    "power": "2^5 + 10",
    "root": r"\sqrt{1764}",
    "assignment": "x = 42",
    "true-chain": "x = 6 \\cdot 7 = 42",
    "true-equation": r"6 \cdot 7 = 42",
    "text-unit": r"42 \text{ cm}",
    "degrees": r"42^\circ",
    "dollars": r"\$42",
    "nested-box": r"\boxed{42}",
    "blanks": "  4" + "2  ",
    "plus": "+42",
    "parentheses": "(42)",
    "left-right": r"\left(42\right)",
    "leading-zeros": "0042",
    "factorials": "4! + 18",
    "percent": r"4200\%",
    "bold": r"\mathbf{42}",
    "math-rm": r"\mathrm{42}",
    "fullwidth-digits": "\uff14\uff12",
    "bold-digits": "\U0001d7d2\U0001d7d0",
}

_BOMBS = {
    "tower": "9^{9^{9^{9^{9}}}}",
    "tower-of-two": "2^{2^{2^{2^{2^{2^{2}}}}}}",
    "huge-power": "9^{999999999}",
    "huge-negative-power": "9^{-999999999}",
    "huge-base": "999999999^{999999999}",
    "difference-of-towers": "9^{9^{9^9}} - 9^{9^{9^9}} + 42.5",
    "giant-factorial": "99999999!",
    "factorial-of-power": "(10^{10})!",
    "factorial-tower": "((((9!)!)!)!)!",
    "giant-binomial": r"\binom{999999999}{499999999}",
    "giant-sum": r"\sum_{i=1}^{10^{12}} \sin(i)",
    "giant-product": r"\prod_{i=1}^{10^{9}} i",
    "hard-integral": r"\int_0^1 \sin(\cos(\tan(x^x))) e^{x^{x}} dx",
    "nested-roots": r"\sqrt{2+" * 40 + "2" + "}" * 40,
    "nested-sines": r"\sin(" * 50 + "1" + ")" * 50,
    "expansion": "(a+b+c+d+e+f+g)^{60} - 1",
    "long-sum": "+".join(f"x_{{{i}}}^{{{i}}}" for i in range(80)),
    "roots-of-power": r"\sqrt[99]{7^{99999999}}",
    "modulus-of-tower": r"9^{9^{9^{9}}} \bmod 7",
    "zeta-like": r"\sum_{n=1}^{\infty} \frac{1}{n^{n}}",
}


def _math() -> Iterator[Case]:
    for name, text in _WRONG_BOXES.items():
        yield _mathematics(f"in-box-{name}", rf"thus \boxed{{{text}}}", 0)
    for name, text in _RIGHT_BOXES.items():
        yield _mathematics(f"right-{name}", rf"thus \boxed{{{text}}}", 1)
    for name, text in _BOMBS.items():
        yield _mathematics(f"bomb-{name}", rf"thus \boxed{{{text}}}", 0, batch="slow")
    yield from _math_sizes()
    yield from _math_plain()


def _math_sizes() -> Iterator[Case]:
    for exponent in (3, 4, 5):
        n = 10**exponent
        yield _mathematics(f"digits-{n}", rf"\boxed{{{'9' * n}}}", 0)
        # 1,000 characters are parsed, more are not.
        yield _mathematics(
            f"open-{n}", rf"\boxed{{{'(' * n}}}", 0, batch="slow" if n == 1000 else "fast"
        )
        yield _mathematics(f"nested-braces-{n}", r"\boxed{" + "{" * n + "42" + "}" * n + "}", 0)
        yield _mathematics(f"boxes-open-{n}", r"\boxed{" * min(n, 28_000), 0)
        yield _mathematics(f"boxes-{n}", r"\boxed{41}" * min(n, 19_000), 0)
        yield _mathematics(f"boxes-right-{n}", r"\boxed{42}" * min(n, 19_000), 1)
        yield _mathematics(f"closing-{n}", "}" * n + r"\boxed{42}", 1)
        yield _mathematics(f"opening-{n}", "{" * n + r"\boxed{42}", 1)
        yield _mathematics(f"backslashes-{n}", "\\" * n, 0)
        yield _mathematics(f"dollars-{n}", "$" * n, 0)
        yield _mathematics(f"fractions-{n}", r"\frac{" * min(n, 30_000), 0)
    yield _mathematics("megabyte", rf"\boxed{{{'1+' * 500_000}1}}", 0)
    yield _mathematics("megabyte-of-text", "x" * 1_000_000 + r"\boxed{42}", 0)
    yield _mathematics("long-text-then-right", "x" * 100_000 + r" \boxed{42}", 1)
    yield _mathematics("nested-parentheses-20", rf"\boxed{{{'(' * 20}41{')' * 20}}}", 0, "slow")
    deep = "(" * 450 + "42" + ")" * 450
    yield _mathematics("nested-parentheses-450", rf"\boxed{{{deep}}}", 0, batch="slow")
    deep = r"\frac{" * 120 + "42" + "}{1}" * 120
    yield _mathematics("nested-fractions-120", rf"\boxed{{{deep}}}", 0, batch="slow")


def _math_plain() -> Iterator[Case]:
    yield _mathematics("plain-number", "42", 1)
    yield _mathematics("plain-sentence", "Therefore the answer is 42.", 1)
    yield _mathematics("plain-final", "The final answer is $42$. I hope it is correct.", 1)
    yield _mathematics("plain-dollars", "so $x = 42$", 1)
    yield _mathematics("plain-display", r"so \[ 6 \cdot 7 = 42 \]", 1)
    yield _mathematics("plain-last-is-right", "The answer is 41. No, the answer is 42.", 1)
    yield _mathematics("plain-last-is-wrong", "The answer is 42. No, the answer is 41.", 0)
    yield _mathematics("plain-wrong", "The answer is 41.", 0)
    yield _mathematics("plain-words", "I do not know.", 0)
    yield _mathematics("plain-tower", "The answer is $9^{9^{9^{9^{9}}}}$", 0, batch="slow")
    yield _mathematics("plain-python-tower", "answer: 9**9**9**9", 0, batch="slow")
    yield _mathematics("box-last-is-right", r"\boxed{41} no \boxed{42}", 1)
    yield _mathematics("box-last-is-wrong", r"\boxed{42} no \boxed{41}", 0)
    yield _mathematics("box-cut-short", r"thus \boxed{42", 0)
    yield _mathematics("box-cut-short-after-right", r"\boxed{42} or rather \boxed{4", 1)
    yield _mathematics("box-empty", r"thus \boxed{}", 0)
    yield _mathematics("box-without-braces", r"the answer is \boxed 42", 1)
    yield _mathematics("empty", "", 0)
    yield _mathematics("blank", " \n\t ", 0)
    yield _mathematics("nothing-but-nul", "\x00" * 10, 0)


def _mathematics(name: str, response: str, reward: float, batch: str = "fast") -> Case:
    return Case(f"math-{name}", "math", MATH, response, reward, batch)
