"""Sorting: what is right, and that its generated problems are a function of the seed."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.config import load_config
from bapo_core.tasks import SyntheticTask, VerdictStatus, get_task
from bapo_core.tasks.sorting import SortingTask

TASK = SortingTask()
DIGEST = "9ef4116609bd83a1"
DIGITS = st.text("0123456789", min_size=1, max_size=24)


@given(DIGITS)
def test_the_sorted_digits_are_right_and_no_other_order_is(digits: str) -> None:
    right = TASK.demonstrate({"digits": digits})
    assert list(right) == sorted(digits)
    assert TASK.verify({"digits": digits}, right).status is VerdictStatus.OK
    if right[::-1] != right:
        verdict = TASK.verify({"digits": digits}, right[::-1])
        assert (verdict.reward, verdict.status) == (0.0, VerdictStatus.WRONG_VALUE)


@pytest.mark.parametrize("response", ["", "1 2", "12=", "１２", "²1", "-12", "12 12", "\x00"])
def test_a_response_that_is_not_digits_alone_is_wrong(response: str) -> None:
    verdict = TASK.verify({"digits": "21"}, response)
    assert (verdict.reward, verdict.status) == (0.0, VerdictStatus.PARSE_ERROR)


def test_a_long_response_is_not_stored_whole() -> None:
    verdict = TASK.verify({"digits": "21"}, "1" * 100_000)
    assert verdict.reward == 0.0
    assert verdict.answer is not None
    assert len(verdict.answer) < 100


def test_generated_problems_are_a_function_of_the_seed() -> None:
    assert isinstance(TASK, SyntheticTask)
    train, test = TASK.generate_split(1, train=2000, test=300)
    assert (train, test) == TASK.generate_split(1, train=2000, test=300)
    assert TASK.generate_split(1, train=10, test=300)[1] == test
    assert TASK.generate_split(2, train=2000, test=300) != (train, test)
    uids = {TASK.uid(problem) for problem in (*train, *test)}
    assert len(uids) == 2300
    lengths = [len(problem["digits"]) for problem in train]
    assert {*lengths} == {*range(4, 11)}
    digest = hashlib.sha256(json.dumps([train, test]).encode()).hexdigest()
    assert digest.startswith(DIGEST), "the problems of all runs of this task have changed"


def test_more_problems_than_there_are_name_the_option() -> None:
    with pytest.raises(ValueError, match="lengths 1 to 1; raise max_length"):
        SortingTask(min_length=1, max_length=1).generate(0, 11)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (4, 25)])
def test_lengths_that_cannot_be_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="give 1 <= min_length <= max_length <= 24"):
        SortingTask(min_length=low, max_length=high)


@pytest.mark.parametrize("digits", ["", "1a", 12, "1" * 25, "１"])
def test_a_row_that_is_not_digits_is_refused(digits: object) -> None:
    with pytest.raises(ValueError, match="give a text of 1 to 24 digits"):
        TASK.parse_row({"digits": digits})


def test_the_example_fits_the_lengths_of_its_task() -> None:
    config = load_config("examples/sorting.yaml")
    task = get_task(config.task.name, **config.task.options)
    assert isinstance(task, SyntheticTask)
    train, test = task.generate_split(
        config.seed, train=config.task.train_prompts, test=config.task.test_prompts
    )
    prompts = [task.render(problem)[0]["content"] for problem in (*train, *test)]
    # One token for each character, and the end of the response.
    longest = max(map(len, prompts))
    assert longest <= config.rollout.max_prompt_tokens
    assert longest <= config.rollout.max_response_tokens
    assert config.task.test_prompts >= 500
    assert config.evaluation.every * 4 <= config.steps
