"""The Countdown task renders, verifies, generates and loads problems."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.errors import TaskError
from bapo_core.tasks import SyntheticTask, get_task, task_names
from bapo_core.tasks.base import VerdictStatus
from bapo_core.tasks.countdown import CountdownTask, is_solvable, random_expression

PROBLEM = {"nums": [3, 4, 7], "target": 84}
SHORT, THINK = CountdownTask(template="short"), CountdownTask(template="think")


def reachable(numbers: Sequence[Fraction]) -> set[Fraction]:
    """Returns every value of an expression over all `numbers`, by brute force."""
    if len(numbers) == 1:
        return {numbers[0]}
    values: set[Fraction] = set()
    for i, j in combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        results = {a + b, a - b, b - a, a * b}
        results |= ({a / b} if b else set()) | ({b / a} if a else set())
        for result in results:
            values |= reachable([*rest, result])
    return values


def values_of(numbers: list[int]) -> set[Fraction]:
    return reachable([Fraction(n) for n in numbers])


# ---- registry ----


def test_tasks_are_found_by_name() -> None:
    assert "countdown" in task_names()
    task = get_task("countdown", template="short", numbers=[4])
    assert isinstance(task, SyntheticTask)
    assert task.name == "countdown"


def test_an_unknown_name_or_option_is_explained() -> None:
    with pytest.raises(
        TaskError, match=r"known tasks: .*countdown, distinct, function, geometry, math"
    ):
        get_task("countup")
    with pytest.raises(TaskError, match=r"task countdown: .*colour"):
        get_task("countdown", colour="red")
    with pytest.raises(TaskError, match="choose short, think, prefilled"):
        get_task("countdown", template="long")
    with pytest.raises(TaskError, match="sizes between 2 and 6"):
        get_task("countdown", numbers=[7])


# ---- rendering ----


def test_templates_contain_the_numbers_and_the_target() -> None:
    assert SHORT.render(PROBLEM) == [{"role": "user", "content": "3 4 7=84:"}]
    [message] = THINK.render(PROBLEM)
    assert message["role"] == "user"
    assert "3, 4, 7" in message["content"]
    assert "84" in message["content"]


def test_the_uid_ignores_the_order_of_the_numbers_only() -> None:
    assert SHORT.uid(PROBLEM) == "countdown:3-4-7:84"
    assert SHORT.uid({"nums": [7, 3, 4], "target": 84}) == SHORT.uid(PROBLEM)
    assert SHORT.uid({"nums": [3, 4, 7], "target": 48}) != SHORT.uid(PROBLEM)
    assert SHORT.uid({"nums": [34, 7], "target": 84}) != SHORT.uid(PROBLEM)


# ---- verification ----


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("3*4*7", "ok"),
        (" 7 * (4 * 3)\n", "ok"),
        ("3*4+7", "wrong_value"),
        ("3*4*7*1", "wrong_numbers"),
        ("3*4*7+3-3", "wrong_numbers"),
        ("12*7", "wrong_numbers"),
        ("84", "wrong_numbers"),
        ("7/(4-3-4+3)", "wrong_numbers"),
        ("3*4*7=84", "parse_error"),
        ("-3*-4*7", "ok"),
        ("+3*4*7", "parse_error"),
        ("", "no_answer"),
        (" \n", "no_answer"),
        ("(" * 600, "too_large"),
        ("9" * 10**6, "too_large"),
    ],
)
def test_a_response_to_the_short_template_is_the_expression_alone(
    response: str, status: str
) -> None:
    verdict = SHORT.verify(PROBLEM, response)
    assert verdict.status == status
    assert verdict.reward == (1.0 if status == "ok" else 0.0)


def test_division_by_zero_has_a_status_of_its_own() -> None:
    verdict = SHORT.verify({"nums": [3, 3, 7], "target": 7}, "7/(3-3)")
    assert (verdict.reward, verdict.status) == (0.0, VerdictStatus.DIVISION_BY_ZERO)


def test_values_are_exact_fractions() -> None:
    # In floating point 1/49*49 is not 1.
    assert SHORT.verify({"nums": [1, 49, 49], "target": 1}, "1/49*49").reward == 1.0
    assert SHORT.verify({"nums": [8, 3, 8, 3], "target": 24}, "8/(3-8/3)").reward == 1.0


@pytest.mark.parametrize(
    ("response", "status", "answer"),
    [
        ("<think>12*7</think> <answer>3*4*7</answer>", "ok", "3*4*7"),
        ("<answer>1</answer> no: <answer> (3*4)*7 </answer> done", "ok", "(3*4)*7"),
        ("3*4*7", "no_answer", None),
        ("<answer>3*4*7", "no_answer", None),
        ("</answer>3*4*7<answer>", "no_answer", None),
        ("<answer></answer>", "no_answer", None),
        ("<answer><answer>3*4*7</answer></answer>", "parse_error", "3*4*7</answer>"),
        ("<answer>" * 10**5 + "</answer>" * 10**5, "too_large", None),
    ],
)
def test_think_responses_answer_in_the_last_tag(
    response: str, status: str, answer: str | None
) -> None:
    verdict = THINK.verify(PROBLEM, response)
    assert (verdict.status, verdict.answer) == (status, answer)


hostile = st.text() | st.text(alphabet="0123456789+-*/() .eE_\n\x00", max_size=600)


@given(hostile, st.sampled_from([SHORT, THINK]), st.booleans())
def test_no_response_raises(text: str, task: CountdownTask, tagged: bool) -> None:
    verdict = task.verify(PROBLEM, f"<answer>{text}</answer>" if tagged else text)
    assert verdict.reward in (0.0, 1.0)
    assert (verdict.reward == 1.0) == (verdict.status is VerdictStatus.OK)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 2**32))
def test_only_reachable_targets_are_rewarded(numbers: list[int], seed: int) -> None:
    """A brute-force search over all expressions finds the value of every expression."""
    text, value = random_expression(numbers, random.Random(seed))
    assert value in values_of(numbers)
    for target in range(1, 30):
        reward = SHORT.verify({"nums": numbers, "target": target}, text).reward
        assert reward == float(target == value)


# ---- solving ----


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_solvable_targets_are_those_that_brute_force_finds(numbers: list[int]) -> None:
    solvable = {t for t in range(1, 101) if is_solvable(numbers, t)}
    assert solvable == {int(v) for v in values_of(numbers) if v.denominator == 1 and 1 <= v <= 100}


@pytest.mark.parametrize(
    ("numbers", "target"),
    [([3, 3, 8, 8], 24), ([1, 5, 5, 5], 24), ([1, 3, 4, 6], 24), ([4, 4, 7, 7], 24)],
)
def test_a_target_that_needs_fractions_is_solvable(numbers: list[int], target: int) -> None:
    assert is_solvable(numbers, target)


def test_problems_of_six_numbers_are_decided() -> None:
    assert is_solvable([1, 3, 7, 10, 25, 50], 765)
    assert not is_solvable([1, 1, 1, 1, 1, 1], 11)


# ---- generation ----

SMALL = CountdownTask(template="short", numbers=[3], max_number=9, min_target=1, max_target=30)


@pytest.mark.parametrize("task", [THINK, CountdownTask(numbers=[4]), SMALL])
def test_generated_problems_are_distinct_solvable_and_as_configured(task: CountdownTask) -> None:
    problems = task.generate(7, 300)
    assert len({task.uid(p) for p in problems}) == 300
    assert {len(p["nums"]) for p in problems} == set(task.numbers)
    for problem in problems:
        assert is_solvable(problem["nums"], problem["target"])
        assert task.min_target <= problem["target"] <= task.max_target
        assert all(1 <= n <= task.max_number for n in problem["nums"])


def test_generation_is_a_function_of_the_seed() -> None:
    assert THINK.generate(1, 20) == THINK.generate(1, 20)
    assert THINK.generate(1, 20) != THINK.generate(2, 20)
    assert json.loads(json.dumps(THINK.generate(1, 20))) == THINK.generate(1, 20)


def test_train_and_test_have_no_common_problem() -> None:
    train, test = SMALL.generate_split(0, train=400, test=200)
    assert (len(train), len(test)) == (400, 200)
    assert not {SMALL.uid(p) for p in train} & {SMALL.uid(p) for p in test}


def test_more_training_data_leaves_the_test_set_alone() -> None:
    few, test = SMALL.generate_split(0, train=50, test=100)
    more, same = SMALL.generate_split(0, train=100, test=100)
    assert test == same
    assert more[:50] == few


def test_an_exhausted_space_is_explained() -> None:
    with pytest.raises(ValueError, match="distinct problems"):
        CountdownTask(numbers=[2], max_number=2, min_target=1).generate(0, 100)


# ---- rows ----


def test_a_valid_row_is_the_payload() -> None:
    row = {"nums": [3, 4, 7], "target": 84}
    assert THINK.parse_row(row) == row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"nums": [3, 4, 7], "target": 85}, "no expression over .* equals 85; correct"),
        ({"nums": [3, 4, 7], "target": 0}, "target is 0; make it a positive"),
        ({"nums": [3, 4, 7], "target": "84"}, "target is '84'"),
        ({"nums": [3.0, 4.0], "target": 12}, "nums is"),
        ({"nums": [3, 0], "target": 3}, "nums is"),
        ({"nums": [3], "target": 3}, "nums is .* 2 to 6"),
        ({"nums": [1] * 7, "target": 7}, "nums is .* 2 to 6"),
        ({"nums": "3 4", "target": 12}, "nums is"),
        ({"nums": None, "target": 12}, "nums is"),
    ],
)
def test_a_bad_row_is_explained(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        THINK.parse_row(row)


def test_a_prefilled_prompt_begins_the_message_of_the_assistant() -> None:
    task = CountdownTask(template="prefilled")
    user, assistant = task.render(PROBLEM)
    assert user == THINK.render(PROBLEM)[0]
    assert assistant["role"] == "assistant"
    assert assistant["content"].endswith("<think>")
    verdict = task.verify(PROBLEM, "3*4 is 12. </think> <answer>3*4*7</answer>")
    assert verdict.status == "ok"
