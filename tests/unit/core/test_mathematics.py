"""The math task extracts answers, compares them, and reads rows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bapo_core.tasks import Task, get_task
from bapo_core.tasks.mathematics import MAX_ANSWER, MathTask

TASK = MathTask()
LENIENT = MathTask(boxed_only=False)
NO_BRACES = str.maketrans("{}", "  ")


def verdict(gold: str, response: str, task: MathTask = LENIENT) -> tuple[float, str]:
    result = task.verify({"problem": "?", "answer": gold}, response)
    return result.reward, str(result.status)


RIGHT = [
    ("42", r"so \boxed{42}"),
    ("42", r"\boxed{41} no, \boxed{ 42 }"),
    ("42", r"\boxed{\boxed{42}}"),
    ("42", r"\fbox{42}"),
    ("42", r"it is \boxed{x = 42}"),
    ("42", r"\boxed{6 \cdot 7 = 42}"),
    ("42", r"\boxed{42 \text{ apples}}"),
    ("42", r"the set \{ \boxed{42}"),
    ("$42$", r"\boxed{42}"),
    (r"\boxed{42}", r"\boxed{84/2}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac12", r"\boxed{\dfrac{2}{4}}"),
    (r"\frac{1}{3}", r"\boxed{0.333333}"),
    ("0.0000001", r"\boxed{10^{-7}}"),
    ("1000", r"\boxed{1,000}"),
    ("4.5e33", r"\boxed{4.5 \times 10^{33}}"),
    ("1e-5", r"\boxed{0.00001}"),
    (r"3.89 \times 10^{-10}", r"\boxed{3.89E-10}"),
    ("x^2 + 1", r"\boxed{1 + x^2}"),
    ("(x+1)^2", r"\boxed{x^2 + 2x + 1}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("(1, 2)", r"\boxed{(1, 2)}"),
    ("[0, 1)", r"\boxed{[0, 1)}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\text{Monday}", r"\boxed{\text{Monday}}"),
    (r"\text{no solution}", r"\boxed{\text{no  solution}}"),
    (r"\infty", r"\boxed{\infty}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    ("75", r"\boxed{75°}"),
    ("75°", r"\boxed{75\degree}"),
    (r"75^\circ", r"\boxed{75}"),
    ("1000", r"\boxed{1\,000}"),
    ("1000000", r"\boxed{1\,000\,000}"),
    ("1000", r"\boxed{1~000}"),
    ("1000", r"\boxed{1{,}000}"),
    ("5", r"\boxed{5~\text{cm}}"),
    ("5", r"\boxed{5,}"),
    ("5", r"\boxed{5;}"),
    ("5", r"\boxed{5\;}"),
    (r"2\sqrt{3}", r"\boxed{2√3}"),
    (r"\sqrt{x+1}", r"\boxed{√(x+1)}"),
    (r"2\pi", r"\boxed{2·π}"),
    (r"[0,\infty)", r"\boxed{[0,∞)}"),
    ("-3", r"\boxed{−3}"),
    ("x^2", r"\boxed{x²}"),
    ("(1,2)", r"\boxed{(1,~2)}"),
    ("(" * 13 + "42" + ")" * 13, r"\boxed{" + "(" * 13 + "42" + ")" * 13 + "}"),
    ("1011_2", r"\boxed{1011_{2}}"),
    ("1011_2", r"\boxed{1011}"),
    ("42", r"\boxed{x = y = 42}"),
    ("5", r"\boxed{x + y = 5}"),
    ("42", "42"),
    ("42", "The answer is 42."),
    ("42", "so $x = 42$"),
    (r"\frac{1}{2}", r"\frac{1}{2}"),
]

WRONG = [
    ("42", r"\boxed{41}", "wrong_value"),
    ("42", r"\boxed{42} no, \boxed{41}", "wrong_value"),
    ("42", r"\boxed{7 = 42}", "wrong_value"),
    ("1e5", r"\boxed{1e6}", "wrong_value"),
    ("4.5e33", r"\boxed{4.5 \times 10^{32}}", "wrong_value"),
    ("42", r"\boxed{x = 41 = 42}", "wrong_value"),
    ("42", r"\boxed{7 = x = 42}", "wrong_value"),
    ("1011_2", r"\boxed{1011_3}", "wrong_value"),
    ("42", r"\boxed{41, 42}", "wrong_value"),
    ("42", r"\boxed{41 \text{ or } 42}", "wrong_value"),
    ("10^{-7}", r"\boxed{0.0}", "wrong_value"),
    ("0.001", r"\boxed{0.00100001}", "wrong_value"),
    (r"\frac{1}{3}", r"\boxed{0.33}", "wrong_value"),
    ("(1, 2)", r"\boxed{(2, 1)}", "wrong_value"),
    ("[0, 1)", r"\boxed{[0, 1]}", "wrong_value"),
    ("x", r"\boxed{y}", "wrong_value"),
    ("42", r"\boxed{\frac{0}{0}}", "wrong_value"),
    ("42", r"\boxed{}", "no_answer"),
    ("42", r"\boxed{42", "no_answer"),
    ("42", r"I considered 42, but \boxed{4", "no_answer"),
    ("42", "", "no_answer"),
    ("42", "none", "no_answer"),
    ("42", r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}", "too_large"),
    ("42", r"\boxed{" + "(" * 13 + "42" + ")" * 13 + "}", "too_large"),
    ("42", "\\boxed{42\x00}", "parse_error"),
    ("42", "\\boxed{\ud800}", "parse_error"),
    ("42", r"\boxed{\frac{42}}", "parse_error"),
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_an_answer_equal_to_the_reference_is_right(gold: str, response: str) -> None:
    assert verdict(gold, response) == (1.0, "ok")


@pytest.mark.parametrize(("gold", "response", "status"), WRONG)
def test_another_response_is_wrong_with_its_status(gold: str, response: str, status: str) -> None:
    assert verdict(gold, response) == (0.0, status)


def test_an_answer_outside_a_box_counts_only_without_boxed_only() -> None:
    assert verdict("42", "the answer is 42", TASK) == (0.0, "no_answer")
    assert verdict("42", r"\boxed{42}", TASK) == (1.0, "ok")
    assert verdict("42", "the answer is 42", LENIENT) == (1.0, "ok")


@pytest.mark.parametrize("seed", range(60))
def test_an_empty_box_changes_no_verdict_of_a_response_without_another_box(seed: int) -> None:
    """Models repeat the instruction, as in "I put the answer within \\boxed{}."."""
    rng = random.Random(seed)
    a, b, gold = rng.randint(2, 99), rng.randint(2, 99), rng.choice(["42", "7.5", "-3"])
    answer = rng.choice([gold, "41"])
    response = rng.choice(
        [
            f"The answer is {answer}.",
            f"First {a} + {b} = {a + b}. So the total is ${answer}$ dollars.",
            f"{a} of them cost {b} each.\nTherefore x = {answer}",
            f"I do not know. {answer}",
            "There is none.",
        ]
    )
    words = response.split(" ")
    place = rng.randint(0, len(words))
    for box in (r"\boxed{}", r"\boxed { }", "\\fbox{\n}", r"within \boxed{}. \boxed{}"):
        filler = box.replace(r"\boxed", "").replace(r"\fbox", "").translate(NO_BRACES)
        with_box, without = (
            LENIENT.verify(
                {"problem": "?", "answer": gold}, " ".join([*words[:place], text, *words[place:]])
            )
            for text in (box, filler)
        )
        assert (with_box.status, with_box.answer) == (without.status, without.answer), box
    # One that is cut off is an answer elsewhere than in the text.
    cut_off = LENIENT.verify({"problem": "?", "answer": gold}, rf"{response} \boxed{{")
    assert cut_off.status == "no_answer"
    assert TASK.verify({"problem": "?", "answer": gold}, rf"\boxed{{}} {response}").reward == 0.0


def test_math_is_a_task_and_renders_problems() -> None:
    task = get_task("math", instruction="Box it.")
    assert isinstance(task, Task)
    assert task.render({"problem": "1+1?", "answer": "2"}) == [
        {"role": "user", "content": "1+1?\n\nBox it."}
    ]
    with_system = get_task("math", instruction="Box it.", system="Be brief.")
    assert with_system.render({"problem": "1+1?", "answer": "2"}) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?\n\nBox it."},
    ]


def test_the_uid_of_a_problem_depends_on_neither_blanks_nor_the_answer() -> None:
    uid = TASK.uid({"problem": "What is\n 1+1?", "answer": "2"})
    # Stored runs identify prompts by their uid, so it may never change.
    assert uid == TASK.uid({"problem": " What is 1+1?", "answer": "3"}) == "math:31adf3e245f99d7b"
    assert uid != TASK.uid({"problem": "What is 1+2?", "answer": "3"})


ALTERNATIVES = {"problem": "?", "answer": ["6630.65", r"\frac{1}{3}", "$x$."]}


@pytest.mark.parametrize("answer", ["6630.65", r"\frac13", r"\frac{2}{6}", "x", "$x$"])
def test_an_answer_that_equals_one_of_several_is_right(answer: str) -> None:
    assert TASK.verify(ALTERNATIVES, f"\\boxed{{{answer}}}").status == "ok"


def test_an_answer_that_equals_none_of_several_is_wrong() -> None:
    assert TASK.verify(ALTERNATIVES, r"\boxed{6630}").status == "wrong_value"
    assert TASK.verify(ALTERNATIVES, "6630.65 is my answer").status == "no_answer"


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [
        ("2", "2"),
        (" 2\n", " 2\n"),  # digests of stored datasets contain it
        (2, "2"),
        (2.5, "2.5"),
        (["2\n"], "2"),
        (["2", 3, " "], ["2", "3"]),
        ("#### 72", "72"),
        ("She sold 48/2 = <<48/2=24>>24 clips for $5.\nSo 48+24 = <<48+24=72>>72.\n#### 72", "72"),
        ("He pays $5*15 = $<<5*15=75.00>>75.00.\n#### 1,075 ", "1,075"),
        ("#### 3\n#### 4", "4"),
        ("So 110.\n#### 110\nThe answer is: 110", "110"),  # as in MetaMathQA
        (r"We get $x=3$, so the answer is $\boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        (r"Thus \boxed{7}. Again, \boxed{7}.", "7"),
        (["#### 2", r"so \boxed{3}"], ["2", "3"]),
    ],
)
def test_an_answer_is_text_a_number_or_a_list_of_those(answer: Any, parsed: Any) -> None:
    row = {"problem": "1+1?", "answer": answer}
    assert TASK.parse_row(row) == {"problem": "1+1?", "answer": parsed}


@pytest.mark.parametrize(
    "answer",
    [
        "He pays $5 for 15 days.\nSo $75.00",  # a solution without a mark
        r"Either \boxed{2} or \boxed{3}.",
        "She has 5 apples and 7 pears, so 12",
        "He spends $5*15 = $75 and then 80",
        "about 12 to 15",
        "A: 5 = 10/2 and B: 7",
        "2 hours 30 minutes",
        "10+5=15",
        "5*15 = 75",
        r"0.56 = 56\%",
        "x = 10/2 = 5",
        ["2", "10+5=15"],
    ],
)
def test_a_solution_that_leaves_its_answer_open_is_reported(answer: str) -> None:
    payload = TASK.parse_row({"problem": "1+1?", "answer": answer})
    assert payload is not None
    reason = TASK.explain_reference(payload)
    assert reason is not None
    assert "\n" not in reason


@pytest.mark.parametrize("seed", range(20))
def test_an_equation_of_random_numbers_is_reported_and_its_result_is_not(seed: int) -> None:
    rng = random.Random(seed)
    one, other = rng.randint(1, 999), rng.randint(1, 999)
    sign, result = rng.choice([("+", one + other), ("-", one - other), ("*", one * other)])
    equation = rng.choice(["{}{}{}={}", "{} {} {} = {}", "${} {} {} = ${}"])
    equation = equation.format(one, sign, other, result)
    assert verdict(equation, rf"\boxed{{{result}}}", TASK)[0] == 0.0
    assert TASK.explain_reference({"answer": equation}) is not None
    assert TASK.explain_reference({"answer": str(result)}) is None


@pytest.mark.parametrize(
    "answer",
    [
        "1, 2 and 3",
        "x=3 and y=4",
        "12 or 13",
        "3 apples and 4 pears",
        "2 1/2 cups",
        r"\frac{1}{7}\triangle ABC",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        "2xy + 3ab",
        "3 sin 2x",
        "5 mod 7",
        r"10^5\text{ J/kg}",
        "10^{-3} mol L^{-1}",
        r"3 \times 10^{-3} mol L^{-1}",
        "x^2y^2z + 3 + 5",
        "x^2 + 3 = 5",
        "f(2) = 7",
        "3:4",
        "x = y = 3",
    ],
)
def test_a_reference_that_is_one_answer_is_not_reported(answer: str) -> None:
    assert TASK.explain_reference({"answer": answer}) is None


def test_the_references_of_the_public_sets_are_read_as_they_are() -> None:
    for answer in (r"\left( 3, \frac{\pi}{2} \right)", "12,3", r"\text{Evelyn}", "# of 4"):
        assert TASK.parse_row({"problem": "?", "answer": answer}) == {
            "problem": "?",
            "answer": answer,
        }


@pytest.mark.parametrize("answer", [None, "", " ", [], [None], [""], "So 5.\n####"])
def test_a_row_without_an_answer_is_left_out(answer: Any) -> None:
    assert TASK.parse_row({"problem": "1+1?", "answer": answer}) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "?", "answer": True}, "answer is True"),
        ({"problem": "?", "answer": float("nan")}, "answer is nan"),
        ({"problem": "?", "answer": {"value": 2}}, "answer is {'value': 2}; make it text"),
        ({"problem": 3, "answer": "3"}, "problem is 3"),
        ({"problem": " ", "answer": "3"}, "problem is ' '"),
    ],
)
def test_a_bad_row_is_explained(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASK.parse_row(row)


@pytest.mark.parametrize(
    "answers",
    [
        ["0.5", r"\frac{1}{2}", r"\dfrac{2}{4}", "1/2", r"\tfrac{1}{2}"],
        ["1234567", "1,234,567", r"1,234,567.0", r"\$1,234,567"],
        ["-7", "-14/2", r"-\frac{7}{1}", " -7. "],
        [r"\left( 3, 4 \right)", "(3,4)", r"(3,\, 4)"],
        ["90", r"90^\circ", r"90^{\circ}", r"90\%", "90°", r"90\degree"],
        ["1000", r"1\,000", "1~000", "1{,}000", "1000;"],
        [r"2\sqrt{3}", "2√3", r"2\,\sqrt{3}"],
    ],
)
def test_equal_numbers_vote_together(answers: list[str]) -> None:
    assert len({MathTask().normalise(answer) for answer in answers}) == 1


@pytest.mark.parametrize("answer", ["1/0", r"\frac{1}{0}", "1,2", "x", "", r"\{1,2\}", "9" * 1000])
def test_answers_that_are_no_numbers_vote_by_their_text(answer: str) -> None:
    assert MathTask().normalise(answer) == answer
