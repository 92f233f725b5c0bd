"""Syncs partition the steps into windows, and an epoch draws each prompt at most once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.sampling import permuted, prompt_positions
from bapo_core.schedule import Phase, SyncSchedule

schedules = st.builds(
    SyncSchedule,
    v=st.integers(1, 12),
    m=st.integers(1, 12),
    phase=st.sampled_from(["algorithm1", "first_step"]),
    lag=st.integers(0, 6),
)
steps = st.integers(1, 200)


@given(schedules, steps)
def test_the_policy_version_is_the_last_sync(schedule: SyncSchedule, t: int) -> None:
    version = schedule.policy_version(t)
    assert 1 <= version <= t
    syncs = [sync for sync in range(1, t + 1) if schedule.syncs_at(sync)]
    assert version == max(1, (syncs[-1] if syncs else 1) - schedule.lag)
    assert schedule.staleness(t) == t - version < schedule.v + schedule.lag


@given(schedules, steps)
def test_windows_partition_the_steps(schedule: SyncSchedule, t: int) -> None:
    window = schedule.sync_window(t)
    assert t in window
    assert all(schedule.sync_window(other) == window for other in window)
    version = max(1, window.start - schedule.lag)
    assert {schedule.policy_version(other) for other in window} == {version}
    assert schedule.syncs_at(window.stop)


@pytest.mark.parametrize(
    ("phase", "syncs"), [("algorithm1", [5, 10, 15]), ("first_step", [1, 6, 11])]
)
def test_a_phase_decides_the_steps_of_syncs(phase: Phase, syncs: list[int]) -> None:
    schedule = SyncSchedule(5, 5, phase)
    assert [t for t in range(1, 16) if schedule.syncs_at(t)] == syncs
    assert [t for t in range(1, 16) if schedule.reevaluates_at(t)] == [5, 10, 15]


@given(schedules)
def test_one_load_serves_both_iff_every_reevaluation_is_a_sync(schedule: SyncSchedule) -> None:
    horizon = range(1, schedule.v * schedule.m * 2 + 1)
    both = all(schedule.syncs_at(t) for t in horizon if schedule.reevaluates_at(t))
    if schedule.one_load_serves_both:
        assert both
    if schedule.phase == "algorithm1":
        assert schedule.one_load_serves_both == (both and not schedule.lag)


@given(
    seed=st.integers(0, 5),
    size=st.integers(1, 60),
    per_step=st.integers(1, 10),
)
def test_an_epoch_draws_each_prompt_at_most_once(seed: int, size: int, per_step: int) -> None:
    def draw(step: int) -> tuple[int, ...]:
        return prompt_positions(seed, step, dataset_size=size, prompts_per_step=per_step)

    steps_per_epoch = size // per_step
    if steps_per_epoch == 0:
        with pytest.raises(ValueError, match="cannot fill one step"):
            draw(1)
        return
    for epoch in range(2):
        drawn = [
            position
            for within in range(1, steps_per_epoch + 1)
            for position in draw(epoch * steps_per_epoch + within)
        ]
        assert len(drawn) == len(set(drawn)) == steps_per_epoch * per_step
        assert set(drawn) <= set(range(size))


@given(size=st.integers(1, 300), key=st.integers(0, 2**63 - 1))
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permuted(i, size=size, key=key) for i in range(size)) == list(range(size))


def test_a_permutation_moves_two_prompts_to_any_two_places_equally_likely() -> None:
    pairs = [(permuted(0, size=6, key=k), permuted(4, size=6, key=k)) for k in range(12_000)]
    drawn = Counter(pairs)
    assert len(drawn) == 30
    # Chi-squared with 29 degrees of freedom exceeds 58.3 once in a thousand draws.
    assert sum((count - 400) ** 2 / 400 for count in drawn.values()) < 58.3
