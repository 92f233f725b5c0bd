"""Tasks on digits: what is right, and that their generated problems are a function of the seed."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.config import load_config
from bapo_core.tasks import SyntheticTask, VerdictStatus, get_task
from bapo_core.tasks.digits import DigitsTask, DistinctTask, SortingTask

SORTING, DISTINCT = SortingTask(), DistinctTask()
DIGEST = {"sorting": "9ef4116609bd83a1", "distinct": "2987ab5dc77e9fd3"}
DIGITS = st.text("0123456789", min_size=1, max_size=24)
of_each_task = pytest.mark.parametrize("task", [SORTING, DISTINCT], ids=lambda task: task.name)


@given(DIGITS)
def test_the_sorted_digits_are_right_and_no_other_order_is(digits: str) -> None:
    right = SORTING.demonstrate({"digits": digits})
    assert list(right) == sorted(digits)
    assert SORTING.verify({"digits": digits}, right).status is VerdictStatus.OK
    if right[::-1] != right:
        verdict = SORTING.verify({"digits": digits}, right[::-1])
        assert (verdict.reward, verdict.status) == (0.0, VerdictStatus.WRONG_VALUE)
        assert verdict.detail == "not the sorted digits"


@given(DIGITS)
def test_each_digit_once_in_the_order_of_its_first_appearance_is_right(digits: str) -> None:
    right = DISTINCT.demonstrate({"digits": digits})
    # A digit that the same digit precedes anywhere is left out.
    assert right == "".join(d for i, d in enumerate(digits) if d not in digits[:i])
    assert DISTINCT.verify({"digits": digits}, right).status is VerdictStatus.OK
    for wrong in (right[::-1], right[:-1], right + right[-1]):
        if wrong not in ("", right):
            verdict = DISTINCT.verify({"digits": digits}, wrong)
            assert (verdict.reward, verdict.status) == (0.0, VerdictStatus.WRONG_VALUE)
            assert verdict.detail == "not the distinct digits"


@of_each_task
@pytest.mark.parametrize("response", ["", "1 2", "12=", "１２", "²1", "-12", "12 12", "\x00"])
def test_a_response_that_is_not_digits_alone_is_wrong(task: DigitsTask, response: str) -> None:
    verdict = task.verify({"digits": "21"}, response)
    assert (verdict.reward, verdict.status) == (0.0, VerdictStatus.PARSE_ERROR)


@of_each_task
def test_a_long_response_is_not_stored_whole(task: DigitsTask) -> None:
    verdict = task.verify({"digits": "21"}, "1" * 100_000)
    assert verdict.reward == 0.0
    assert verdict.answer is not None
    assert len(verdict.answer) < 100


@of_each_task
def test_generated_problems_are_a_function_of_the_seed(task: DigitsTask) -> None:
    assert isinstance(task, SyntheticTask)
    train, test = task.generate_split(1, train=2000, test=300)
    assert (train, test) == task.generate_split(1, train=2000, test=300)
    assert task.generate_split(1, train=10, test=300)[1] == test
    assert task.generate_split(2, train=2000, test=300) != (train, test)
    uids = {task.uid(problem) for problem in (*train, *test)}
    assert len(uids) == 2300
    lengths = [len(problem["digits"]) for problem in train]
    assert {*lengths} == {*range(4, 11)}
    digest = hashlib.sha256(json.dumps([train, test]).encode()).hexdigest()
    assert digest[:16] == DIGEST[task.name], "the problems of all runs of this task have changed"


def test_more_problems_than_there_are_name_the_option() -> None:
    with pytest.raises(ValueError, match="lengths 1 to 1; raise max_length"):
        SortingTask(min_length=1, max_length=1).generate(0, 11)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (4, 25)])
def test_lengths_that_cannot_be_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="give 1 <= min_length <= max_length <= 24"):
        DistinctTask(min_length=low, max_length=high)


@of_each_task
@pytest.mark.parametrize("digits", ["", "1a", 12, "1" * 25, "１"])
def test_a_row_that_is_not_digits_is_refused(task: DigitsTask, digits: object) -> None:
    with pytest.raises(ValueError, match="give a text of 1 to 24 digits"):
        task.parse_row({"digits": digits})


@of_each_task
def test_the_example_fits_the_lengths_of_its_task(task: DigitsTask) -> None:
    config = load_config(f"examples/{task.name}.yaml")
    generator = get_task(config.task.name, **config.task.options)
    assert generator == task
    assert isinstance(generator, SyntheticTask)
    train, test = generator.generate_split(
        config.seed, train=config.task.train_prompts, test=config.task.test_prompts
    )
    prompts = [generator.render(problem)[0]["content"] for problem in (*train, *test)]
    # One token for each character, and the end of the response.
    longest = max(map(len, prompts))
    assert longest <= config.rollout.max_prompt_tokens
    assert longest <= config.rollout.max_response_tokens
    assert config.task.test_prompts >= 500
    assert config.evaluation.every * 4 <= config.steps
