"""The costs of crashes are computed from the log of the engines."""

from __future__ import annotations

import pytest

from benchmarks.crash_cost import Generation, concurrency, costs

KEYS = [(1, seed) for seed in range(3)]


PLACES = ["first", "second"]


def generation(
    key: int,
    began: float,
    ended: float | None,
    *,
    continued_s: float = 0.0,
    complete: bool = True,
) -> Generation:
    return Generation(KEYS[key], continued_s, began, ended, complete)


def test_without_kills_nothing_is_lost() -> None:
    found = costs([generation(0, 0.0, 2.0), generation(1, 1.0, 2.0)], PLACES, [])
    assert found["generated_s"] == 3.0
    assert found["lost_s"] == {}
    assert found["lost_s_per_kill"] == found["lost_s_without_kill"] == 0.0


def test_all_generations_of_a_group_but_the_last_are_lost_at_the_next_kill() -> None:
    generations = [
        generation(0, 0.0, None, complete=False),  # cut off by the first kill
        generation(1, 1.0, 2.0),  # complete, but not delivered
        generation(0, 6.0, 8.0),
        generation(1, 6.0, 7.5, complete=False),  # cancelled by the second kill's consequences
        generation(1, 11.0, 12.0),
        generation(2, 3.5, 4.5),
    ]
    found = costs(generations, PLACES, [3.0, 7.0])
    assert list(found["lost_s"].values()) == [3.0 + 1.0, 1.5]
    assert found["lost_s_per_kill"] == pytest.approx(5.5 / 2)
    assert (found["groups"], found["generations"]) == (3, 6)


def test_what_another_generation_continues_is_not_lost() -> None:
    generations = [
        generation(0, 0.0, None, complete=False),  # 10 s when it is killed
        generation(0, 12.0, None, continued_s=8.5, complete=False),  # 8.5 + 8 s when it is killed
        generation(0, 21.0, 24.5, continued_s=16.5),
    ]
    found = costs(generations, PLACES, [10.0, 20.0])
    assert found["lost_s"] == {"first": 1.5, "second": 0.0}
    assert found["generated_s"] == 10.0 + 8.0 + 3.5


def test_groups_that_were_never_completed_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 groups were begun and never completed"):
        costs([generation(0, 0.0, 1.0, complete=False)], PLACES, [2.0])


def test_concurrency_leaves_out_times_in_which_nothing_is_generated() -> None:
    generations = [generation(0, 0.0, 2.0), generation(1, 1.0, 2.0), generation(2, 10.0, 11.0)]
    assert concurrency(generations) == pytest.approx(4.0 / 3.0)
