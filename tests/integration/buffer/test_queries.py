"""Queries about a run, compared with an independent account of the run that the test keeps."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bapo_core.resolution import Observation, resolve
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup, decode_groups, encode_groups
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, synthetic_group

STEPS = 70
"""Past the second difficulty snapshot, which is taken at step 64."""
SIZE = 4
"""G of `small_config`."""


class Account:
    """Runs 70 steps and keeps the results of every group."""

    def __init__(self, stack: Endpoints) -> None:
        self.driver = Driver(stack, small_config("queries", steps=STEPS, seed=3))
        self.client = self.driver.client
        self.groups: list[tuple[int, str, str, int]] = []
        """(step, kind, uid, correct) of every group, oldest first."""
        self.manifests: dict[int, wire.BatchManifest] = {}
        for step in range(1, STEPS + 1):
            self._roll_out(step, "fresh")
            if self.driver.config.schedule.reevaluates_at(step):
                self._roll_out(step, "reevaluation")
            self.manifests[step] = self.client.batch(step)
            self.client.commit(step, {"loss": 1 / step})

    def _roll_out(self, step: int, kind: wire.Kind) -> None:
        groups = self.driver.groups(step, kind)
        if groups:
            self.client.post_groups(step, kind, encode_groups(groups))
        self.groups += [(step, kind, group.prompt_uid, group.correct) for group in groups]

    def last_bins(self, step: int) -> dict[str, int]:
        """Returns k of G at the last attempt up to `step`, by uid."""
        return {uid: correct for made_at, _, uid, correct in self.groups if made_at <= step}

    def means(self) -> dict[str, list[float]]:
        """Returns the accuracy of each attempt, by uid."""
        means: dict[str, list[float]] = defaultdict(list)
        for _, _, uid, correct in self.groups:
            means[uid].append(correct / SIZE)
        return means


@pytest.fixture(scope="module")
def account(stack: Endpoints) -> Account:
    return Account(stack)


def counts(bins: list[int]) -> list[int]:
    return [bins.count(k) for k in range(SIZE + 1)]


# ---- difficulty ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2, 5, 63, 64, 65, STEPS])
def test_bins_as_of_a_step(account: Account, step: int) -> None:
    answer = account.client.difficulty_bins(step)
    last = account.last_bins(step)
    assert answer.bins == counts(list(last.values()))
    assert answer.unseen == 24 - len(last)


def test_bins_over_time(account: Account) -> None:
    history = account.client.difficulty_history(points=10)
    assert len(history) <= 10
    assert history[-1].step == STEPS
    assert [point.step for point in history] == sorted(point.step for point in history)
    for point in history:
        assert point.bins == counts(list(account.last_bins(point.step).values()))


@pytest.mark.parametrize(("before", "after"), [(0, 3), (1, 2), (3, 64), (63, 70), (65, 66), (9, 9)])
def test_migration_between_any_two_steps(account: Account, before: int, after: int) -> None:
    answer = account.client.difficulty_migration(before, after)
    first, second = account.last_bins(before), account.last_bins(after)
    expected = [[0] * (SIZE + 1) for _ in range(SIZE + 1)]
    for uid in first:
        expected[first[uid]][second[uid]] += 1
    assert answer.matrix == expected
    assert answer.newly_attempted == counts([second[uid] for uid in second.keys() - first.keys()])
    assert answer.unlocked == sum(1 for uid in first if first[uid] == 0 < second[uid])


def test_a_step_that_is_not_committed_has_no_bins(account: Account) -> None:
    with pytest.raises(ServiceError, match=r"step 71 is not in 0\.\.70"):
        account.client.difficulty_bins(71)
    with pytest.raises(ServiceError, match=r"after: step 99 is not in 0\.\.70"):
        account.client.difficulty_migration(1, 99)


# ---- prompts ------------------------------------------------------------------------------------


def uids(account: Account, **filters: object) -> list[str]:
    """Reads all pages of a listing, three prompts at a time."""
    listed: list[str] = []
    cursor: str | None = None
    while True:
        page = account.client.prompts(cursor=cursor, limit=3, **filters)
        assert len(page.items) <= 3
        listed += [item.uid for item in page.items]
        if page.next is None:
            return listed
        cursor = page.next


def test_listing_by_bin(account: Account) -> None:
    last = account.last_bins(STEPS)
    for bin_ in range(SIZE + 1):
        listed = uids(account, bin=bin_)
        assert sorted(listed) == sorted(uid for uid, k in last.items() if k == bin_)


def test_listing_by_trend(account: Account) -> None:
    means = account.means()
    expected = {
        "improving": {uid for uid, m in means.items() if m[-1] > m[0]},
        "worsening": {uid for uid, m in means.items() if m[-1] < m[0]},
        "steady": {uid for uid, m in means.items() if m[-1] == m[0]},
        "forgotten": {uid for uid, m in means.items() if m[-1] == 0 < max(m)},
        "never_solved": {uid for uid, m in means.items() if max(m) == 0},
    }
    assert expected["improving"]
    assert expected["worsening"]
    for trend, expected_uids in expected.items():
        assert set(uids(account, trend=trend)) == expected_uids, trend


def test_unlocked_between_two_steps(account: Account) -> None:
    first_solved: dict[str, int] = {}
    began_at_zero: dict[str, bool] = {}
    for step, _, uid, correct in account.groups:
        began_at_zero.setdefault(uid, correct == 0)
        if correct:
            first_solved.setdefault(uid, step)
    unlocked = {uid: step for uid, step in first_solved.items() if began_at_zero[uid]}
    assert len(unlocked) >= 2
    for after, until in [(0, STEPS), (0, 6), (6, STEPS), (STEPS, STEPS), (9, 3)]:
        expected = {uid for uid, step in unlocked.items() if after < step <= until}
        listed = uids(account, unlocked_after=after, unlocked_until=until)
        assert set(listed) == expected
        assert [unlocked[uid] for uid in listed] == sorted(unlocked[uid] for uid in listed)
        hardest = uids(account, unlocked_after=after, unlocked_until=until, order="hardest")
        assert set(hardest) == expected
    assert set(uids(account, order="unlocked")) == set(unlocked)


@pytest.mark.parametrize("order", ["hardest", "most_improved"])
def test_orders(account: Account, order: str) -> None:
    means = account.means()
    listed = uids(account, order=order)
    assert sorted(listed) == sorted(means)
    keys = [
        (max(means[uid]), -len(means[uid]))
        if order == "hardest"
        else (means[uid][0] - means[uid][-1],)
        for uid in listed
    ]
    assert keys == sorted(keys)


def test_search_in_uid_and_payload(account: Account) -> None:
    prompt = next(account.client.all_prompts())
    target = str(prompt.payload["target"])
    matches = {item.uid for item in account.client.all_prompts(search=target)}
    assert prompt.uid in matches
    assert matches == {
        item.uid
        for item in account.client.all_prompts()
        if target in item.uid or target in str(item.payload)
    }
    assert list(account.client.all_prompts(search="no such words")) == []
    assert list(account.client.all_prompts(search="%")) == [], "a wildcard is a plain character"


def test_a_cursor_belongs_to_its_list(account: Account) -> None:
    page = account.client.prompts(limit=3, order="hardest")
    with pytest.raises(ServiceError, match=r"cursor: .* is not a cursor of this list"):
        account.client.prompts(cursor=page.next, order="most_improved")
    for forged in ("x", "bm9wZQ", "WyJzdG9yZWQiLCAiYSJd"):
        with pytest.raises(ServiceError, match="cursor") as caught:
            account.client.prompts(cursor=forged)
        assert caught.value.status == 400


def test_a_prompts_history(account: Account) -> None:
    uid = account.groups[0][2]
    history = account.client.prompt_history(uid)
    expected = [(step, kind, correct) for step, kind, of, correct in account.groups if of == uid]
    assert [(a.step, a.kind, a.correct) for a in history.attempts] == expected
    for attempt in history.attempts:
        steps = [
            step
            for step, manifest in account.manifests.items()
            if attempt.group_id in {member.group_id for member in manifest.members}
        ]
        assert attempt.batches == steps
    for buffer in ("hard", "high_quality"):
        steps_inside = {step for step in range(STEPS + 1) if _holds(account, buffer, step, uid)}
        stays = [stay for stay in history.stays if stay.buffer == buffer]
        assert steps_inside == {
            step
            for stay in stays
            for step in range(stay.inserted_step, stay.evicted_step or STEPS + 1)
        }
    with pytest.raises(ServiceError, match="there is no prompt 'unknown'"):
        account.client.prompt_history("unknown")


def _holds(account: Account, buffer: wire.BufferName, step: int, uid: str) -> bool:
    return uid in {item.prompt_uid for item in account.client.buffer(buffer, step)}


# ---- decisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 40, STEPS])
def test_every_decision_agrees_with_the_batch(account: Account, step: int) -> None:
    source_of = {m.prompt_uid: m.source for m in account.manifests[step].members}
    drawn = {uid for made_at, kind, uid, _ in account.groups if (made_at, kind) == (step, "fresh")}
    for prompt in account.client.all_prompts():
        decision = account.client.decision(step, prompt.uid)
        assert decision.used == (prompt.uid in source_of)
        assert decision.source == source_of.get(prompt.uid)
        used_by = [source.source for source in decision.considered if source.outcome == "used"]
        assert used_by == ([source_of[prompt.uid]] if prompt.uid in source_of else [])
        fresh, reevaluated, replayed = decision.considered
        assert (fresh.outcome == "not_considered") == (prompt.uid not in drawn)
        in_high = _holds(account, "high_quality", step - 1, prompt.uid)
        assert (replayed.outcome != "not_considered") == in_high
        if step % 2:
            assert reevaluated.outcome == "not_considered"
        assert all(source.reason for source in decision.considered)


def test_a_decision_names_the_setting_that_made_it(stack: Endpoints) -> None:
    driver = Driver(
        stack,
        small_config(
            "queries-decisions",
            reevaluate={"c1": 0.5, "max_prompts": 1},
            replay="off",
        ),
    )
    for step in (1, 2):
        driver.run_step(step)
    reasons = set()
    for prompt in driver.client.all_prompts():
        for step in (1, 2):
            reasons |= {
                source.reason for source in driver.client.decision(step, prompt.uid).considered
            }
    hard = len(driver.client.buffer("hard", 1))
    assert (
        f"not sampled: 1 of {hard} hard entries were drawn for re-evaluation "
        "(reevaluate.max_prompts = 1)"
    ) in reasons
    assert "this step has no re-evaluation (sync.reevaluate_every = 2)" in reasons
    assert "this run has no replay (replay.select = off)" in reasons
    assert any("(fresh.filter = range)" in reason for reason in reasons)


def test_the_replay_draws_from_what_is_not_in_the_batch_yet(stack: Endpoints) -> None:
    """The number of candidates that an explanation names is that of an independent count."""
    settings = {
        "replay": {
            "window": {"direction": "fixed", "c2_range": [0, 0], "c3_range": [1, 1]},
            "buffer": {"capacity": 256, "max_age": 50},
        },
        "batch": {"capacity": 3},
        "optimizer": {"minibatch_prompts": 3},
    }
    driver = Driver(stack, small_config("queries-candidates", **settings))
    for step in range(1, 9):
        driver.run_step(step)
    explained = 0
    for step in range(2, 9):
        members = driver.client.recorded_batch(step).members
        others = {member.prompt_uid for member in members if member.source != "replayed"}
        entries = {entry.prompt_uid for entry in driver.client.buffer("high_quality", step - 1)}
        for prompt in driver.client.all_prompts():
            *_, replayed = driver.client.decision(step, prompt.uid).considered
            if replayed.reason.startswith("not sampled"):
                assert f": {len(entries - others)} entries within" in replayed.reason
                assert f"and {3 - len(others)} of them were drawn" in replayed.reason
                explained += 1
    assert explained


def test_the_uniform_filter_is_not_explained_by_rewards(stack: Endpoints) -> None:
    settings = {"fresh": {"filter": "uniform", "uniform_fraction": 0.0}}
    driver = Driver(stack, small_config("queries-uniform", **settings))
    driver.run_step(1)
    reasons = [
        driver.client.decision(1, prompt.uid).considered[0].reason
        for prompt in driver.client.all_prompts()
    ]
    removed = [reason for reason in reasons if "(fresh.filter = uniform)" in reason]
    assert removed
    assert all(reason.endswith("which keeps groups at random") for reason in removed)


def test_a_step_without_a_batch_has_no_decision(account: Account) -> None:
    uid = account.groups[0][2]
    with pytest.raises(ServiceError, match="there is no batch of step 71"):
        account.client.decision(71, uid)


# ---- buffers and batches ------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", ["hard", "high_quality"])
def test_events_add_up_to_the_contents_of_every_step(
    account: Account, buffer: wire.BufferName
) -> None:
    events = list(account.client.buffer_events(buffer, page_size=7))
    assert [event.step for event in events] == sorted(event.step for event in events)
    assert {"admitted", "evicted"} == {event.event for event in events}
    held: set[int] = set()
    for step in range(1, STEPS + 1):
        for event in (event for event in events if event.step == step):
            if event.event == "admitted":
                held.add(event.group_id)
            else:
                held.remove(event.group_id)
                assert event.reason in {"capacity", "expired", "replaced", "solved"}
        contents = account.client.buffer(buffer, step)
        assert {item.group_id for item in contents} == held
        for item in contents:
            assert item.age == step - item.step >= 0
            assert item.staleness >= item.age
    later = account.client.buffer_events(buffer, after=50)
    assert list(later) == [event for event in events if event.step > 50]


@pytest.mark.parametrize("step", [None, 0, 1, 40])
def test_the_sizes_of_the_buffers_agree_with_their_entries(
    account: Account, step: int | None
) -> None:
    sizes = {size.buffer: size for size in account.client.buffers(step)}
    assert list(sizes) == ["hard", "high_quality"]
    for buffer, size in sizes.items():
        items = account.client.buffer(buffer, step)
        assert size.step == (STEPS if step is None else step)
        assert size.entries == len(items) <= size.capacity
        if not items:
            assert size.mean_accuracy is size.mean_age is size.max_staleness is None
            continue
        assert size.mean_accuracy == pytest.approx(mean(item.accuracy for item in items))
        assert size.mean_age == pytest.approx(mean(item.age for item in items))
        assert size.max_age == max(item.age for item in items)
        assert size.mean_staleness == pytest.approx(mean(item.staleness for item in items))
        assert size.max_staleness == max(item.staleness for item in items)
    assert step == 0 or any(size.entries for size in sizes.values())
    with pytest.raises(ServiceError, match="step"):
        account.client.buffers(STEPS + 1)


def test_batches_are_listed_by_step(account: Account) -> None:
    summaries = list(account.client.batches(page_size=60))
    assert list(account.client.batches(after=50, page_size=7)) == summaries[50:]
    assert [summary.step for summary in summaries] == list(range(1, STEPS + 1))
    for summary in summaries:
        assert summary.counts == account.manifests[summary.step].counts


def test_a_batch_as_arrow(account: Account) -> None:
    step = max(account.manifests, key=lambda s: len({m.step for m in account.manifests[s].members}))
    members = account.manifests[step].members
    assert len({member.object_key for member in members}) > 1
    groups = decode_groups(account.client.batch_arrow(step))
    assert [group.prompt_uid for group in groups] == [member.prompt_uid for member in members]
    assert [group.correct for group in groups] == [member.correct for member in members]
    view = account.client.group(members[0].group_id)
    assert [r.token_ids for r in view.responses] == [r.token_ids for r in groups[0].responses]


def test_a_damaged_object_aborts_the_download(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("queries-damaged"))
    manifest = driver.run_step(1)
    key = manifest.members[0].object_key
    other = [dataclasses.replace(g, prompt_token_ids=[9]) for g in driver.groups(1)]
    ObjectStore(stack.object_store).put(key, encode_groups(other))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(
            f"{stack.buffer_url}/v1/runs/queries-damaged/batches/1/arrow",
            headers={"Authorization": f"Bearer {stack.token}"},
        )
    with pytest.raises(ServiceError, match="the object was damaged or replaced"):
        driver.client.group(manifest.members[0].group_id)


def test_difficulty_as_parquet(account: Account) -> None:
    table = pq.read_table(io.BytesIO(account.client.difficulty_parquet()))
    rows = {row["uid"]: row for row in table.to_pylist()}
    listed = list(account.client.all_prompts())
    assert len(rows) == len(listed)
    for item in listed:
        row = rows[item.uid]
        for name in ("attempts", "first_mean", "last_mean", "best_mean", "last_step", "bin"):
            assert row[name] == getattr(item, name)


def test_steps_are_sampled_by_the_service(account: Account) -> None:
    url = f"{account.driver.stack.buffer_url}/v1/runs/queries/steps"
    headers = {"Authorization": f"Bearer {account.driver.stack.token}"}
    steps = httpx.get(url, params={"points": 9}, headers=headers).json()
    assert 1 < len(steps) <= 9
    assert steps[-1]["step"] == STEPS
    gaps = {b["step"] - a["step"] for a, b in itertools.pairwise(steps)}
    assert len(gaps) == 1


def test_an_unchanged_answer_is_not_sent_again(account: Account) -> None:
    url = f"{account.driver.stack.buffer_url}/v1/runs/queries/difficulty/bins"
    headers = {"Authorization": f"Bearer {account.driver.stack.token}"}
    first = httpx.get(url, headers=headers)
    tag = first.headers["etag"]
    repeated = httpx.get(url, headers={**headers, "If-None-Match": f'"other", W/{tag}'})
    assert (repeated.status_code, repeated.content) == (304, b"")
    assert repeated.headers["etag"] == tag
    other = httpx.get(url, params={"step": 1}, headers={**headers, "If-None-Match": tag})
    assert other.status_code == 200


def test_runs_side_by_side(account: Account, stack: Endpoints) -> None:
    other = Driver(stack, small_config("queries-other", seed=4, reevaluate={"c1": 0.5}))
    other.run_step(1)
    Driver(stack, small_config("queries-empty", seed=5))
    answer = account.client.compare("queries-other", "queries-empty")
    first, second, third = answer.runs
    assert [run.run for run in answer.runs] == ["queries", "queries-other", "queries-empty"]
    assert [run.step for run in answer.runs] == [STEPS, 1, 0]
    assert answer.differing_config["seed"] == [3, 4, 5]
    assert answer.differing_config["reevaluate.c1"] == [0.25, 0.5, 0.25]
    assert not {"name", "rollout.group_size"} & answer.differing_config.keys()
    steps = account.client.steps()
    assert [point.step for point in first.fresh] == [step.step for step in steps]
    assert [point.accuracy for point in first.fresh] == [step.accuracy for step in steps]
    for name in ("rollouts", "tokens"):
        costs = list(itertools.accumulate(getattr(step, name) for step in steps))
        assert [getattr(point, name) for point in first.fresh] == costs
    assert first.cost.rollouts == first.fresh[-1].rollouts
    assert second.cost.rollouts == 8 * SIZE
    assert (third.cost, third.fresh, third.evaluations) == (wire.Cost(), [], [])
    assert first.difficulty == account.client.difficulty_bins()


def test_accuracies_come_with_what_it_took_to_train_the_version(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("accuracy-costs"))
    for version in range(1, 5):
        if version in (1, 4):
            driver.client.post_groups(
                version, "evaluation", encode_groups(driver.groups(version, "evaluation"))
            )
        driver.roll_out(version)
        driver.client.batch(version)
        seconds = {"seconds/wait": 1.5, "seconds/update": 0.5, "trainer/seconds": 100.0}
        driver.client.commit(version, seconds)
    (run,) = driver.client.compare().runs
    assert [point.version for point in run.evaluations] == [1, 4]
    first, last = run.evaluations
    assert (first.rollouts, first.tokens, first.seconds) == (0, 0, 0.0)
    steps = driver.client.steps()[:3]
    assert last.rollouts == sum(step.rollouts for step in steps)
    assert (last.tokens, last.seconds) == (sum(step.tokens for step in steps), 6.0)


def test_a_comparison_of_too_many_runs_is_refused(account: Account) -> None:
    with pytest.raises(ServiceError, match="List should have at most 24 items"):
        account.client.compare(*["queries"] * 24)


def test_a_comparison_of_more_variants_than_colours_is_refused(stack: Endpoints) -> None:
    drivers = [
        Driver(stack, small_config(f"variants-{number}", steps=10 + number)) for number in range(9)
    ]
    names = [driver.config.name for driver in drivers[1:]]
    assert len(drivers[0].client.compare(*names[:7]).variants) == 8
    with pytest.raises(ServiceError, match="the runs are 9 variants, and a comparison has 8 at"):
        drivers[0].client.compare(*names)


def _run_and_evaluate(
    stack: Endpoints, name: str, evaluations: dict[int, Sequence[float]], **sections: Any
) -> Driver:
    """Runs all steps; the responses to each held-out prompt have these rewards by version.

    A response is correct if its reward is 1.
    """
    driver = Driver(stack, small_config(name, **sections))
    for step in range(1, driver.config.steps + 2):
        if rewards := evaluations.get(step):
            groups = driver.groups(step, "evaluation")
            driver.client.post_groups(
                step, "evaluation", encode_groups([_with_rewards(each, rewards) for each in groups])
            )
        if step <= driver.config.steps:
            driver.run_step(step)
    return driver


def _with_rewards(group: TrajectoryGroup, rewards: Sequence[float]) -> TrajectoryGroup:
    responses = [
        dataclasses.replace(response, reward=reward, correct=reward == 1)
        for response, reward in zip(group.responses, rewards, strict=True)
    ]
    return dataclasses.replace(group, responses=responses)


def _correct(count: int) -> list[float]:
    return [float(index < count) for index in range(SIZE)]


def _run_variants(
    stack: Endpoints, name: str, finals: dict[str, Sequence[Sequence[float]]]
) -> list[Driver]:
    """Runs variants for four steps, whose last evaluations have these rewards for each seed."""
    return [
        _run_and_evaluate(
            stack,
            f"{name}-{label}-s{seed}",
            {1: _correct(0), 4: rewards, 5: rewards},
            steps=4,
            seed=seed,
            reevaluate={"c1": 0.25 * (1 + number)},
        )
        for number, (label, of_seeds) in enumerate(finals.items())
        for seed, rewards in enumerate(of_seeds, start=1)
    ]


def _compare(drivers: Sequence[Driver]) -> wire.RunComparison:
    return drivers[0].client.compare(*(driver.config.name for driver in drivers[1:]))


def test_variants_whose_difference_the_seeds_do_not_decide_share_places(stack: Endpoints) -> None:
    correct = {"low": (0, 0, 1), "a": (3, 3, 4), "b": (4, 3, 4)}
    finals = {label: [_correct(count) for count in counts] for label, counts in correct.items()}
    drivers = _run_variants(stack, "places", finals)
    waiting = Driver(stack, small_config("waiting", steps=4, seed=4))
    answer = _compare([*drivers, waiting])
    assert answer.measure == "accuracy"
    first, *others = answer.variants
    assert (first.name, first.seeds) == ("places-low-s1 and 3 more", [1, 2, 3, 4])
    assert [(each.name, each.seeds) for each in others] == [
        ("places-a", [1, 2, 3]),
        ("places-b", [1, 2, 3]),
    ]
    equal = answer.at_equal["steps"]
    # The versions 4 and 5; the initial model's evaluation does not count.
    assert equal.costs == [3, 4]
    low, a, b = equal.variants
    assert low.values == [0.0, 0.0, 0.25, None]
    assert (a.values, b.values) == ([0.75, 0.75, 1.0], [1.0, 0.75, 1.0])
    assert (low.places, a.places, b.places) == ((3, 3), (1, 2), (1, 2))
    observations = [
        Observation(label, seed, value)
        for label, result in zip(finals, equal.variants, strict=True)
        for seed, value in enumerate(result.values, start=1)
        if value is not None
    ]
    resolution = resolve(observations)
    assert resolution is not None
    assert equal.resolution == wire.Resolution(
        standard_deviation=resolution.deviation,
        degrees_of_freedom=4,
        smallest_difference=resolution.smallest_difference,
    )
    assert 0.25 / 3 < resolution.smallest_difference < 0.75
    assert low.difference is None
    assert b.difference is not None
    differences = [1.0, 0.75, 0.75]
    assert (b.difference.seeds, b.difference.mean) == (3, statistics.mean(differences))
    half_width = 4.303 * statistics.stdev(differences) / 3**0.5
    assert b.difference.half_width == pytest.approx(half_width, rel=1e-3)
    two_seeds = _compare([driver for driver in drivers[3:] if driver.config.seed < 3])
    difference = two_seeds.at_equal["steps"].variants[1].difference
    assert difference is not None
    assert (difference.seeds, difference.half_width) == (2, None)


def test_runs_are_compared_at_the_costs_of_the_run_that_cost_least(stack: Endpoints) -> None:
    cheap = _run_and_evaluate(
        stack,
        "costs-cheap",
        {1: _correct(0), 4: _correct(3), 5: _correct(4)},
        steps=4,
        rollout={"prompts_per_step": 4, "group_size": SIZE},
    )
    dear = _run_and_evaluate(
        stack, "costs-dear", {1: _correct(0), 4: _correct(2), 7: _correct(4)}, steps=6
    )
    answer = _compare([dear, cheap])
    assert answer.differing_config["steps"] == [6, 4]
    for cost in ("rollouts", "tokens"):
        equal = answer.at_equal[cost]
        assert equal.cheapest_run == "costs-cheap"
        curve, base = (
            [(getattr(point, cost), point.mean_accuracy) for point in run.evaluations]
            for run in answer.runs
        )
        assert equal.costs == [spent for spent, _ in base[1:]]
        assert equal.variants[1].values == [(0.75 + 1) / 2]
        expected = np.interp(equal.costs, *zip(*curve, strict=True)).mean()
        assert equal.variants[0].values == [pytest.approx(expected)]
    steps = answer.at_equal["steps"]
    assert steps.costs == [3, 4]
    assert steps.variants[0].values == [pytest.approx((0.5 + 0.5 + 0.5 / 3) / 2)]


def test_one_seed_each_gives_no_places(stack: Endpoints) -> None:
    drivers = _run_variants(stack, "one-seed", {"a": [_correct(4)], "b": [_correct(0)]})
    equal = _compare(drivers).at_equal["steps"]
    assert equal.resolution is None
    assert [result.places for result in equal.variants] == [None, None]
    assert [result.values for result in equal.variants] == [[1.0], [0.0]]


def test_runs_without_a_correct_response_are_compared_by_their_rewards(stack: Endpoints) -> None:
    finals = {
        label: [[reward + seed / 64] * SIZE for seed in (1, 2, 3)]
        for label, reward in (("bad", -1.0), ("good", 2.0))
    }
    answer = _compare(_run_variants(stack, "queries-by-reward", finals))
    assert answer.measure == "reward"
    bad, good = answer.at_equal["steps"].variants
    assert good.values == [2 + seed / 64 for seed in (1, 2, 3)]
    assert (bad.places, good.places) == ((2, 2), (1, 1))
    assert answer.runs[0].evaluations[-1].mean_reward == -1 + 1 / 64
    steps = answer.runs[0].fresh
    assert all(point.mean_reward == point.accuracy for point in steps)


def test_a_run_that_is_named_twice_is_compared_once(account: Account) -> None:
    assert [run.run for run in account.client.compare("queries").runs] == ["queries"]


def test_evaluations_are_listed_once_complete(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("queries-evaluation"))
    prompts = driver.client.step_prompts(1, "evaluation").prompts
    rng = random.Random(1)
    groups = [synthetic_group(prompt.uid, 1, size=SIZE, rng=rng) for prompt in prompts]
    driver.client.post_groups(1, "evaluation", encode_groups(groups[:1]))
    assert driver.client.evaluations() == []
    with pytest.raises(ServiceError, match="no complete evaluation of version 1"):
        driver.client.evaluation_migration(1, 1)
    driver.client.post_groups(1, "evaluation", encode_groups(groups[1:]))
    (evaluation,) = driver.client.evaluations()
    assert evaluation.bins == counts([group.correct for group in groups])
    assert evaluation.prompts == len(prompts)
    correct = sum(group.correct for group in groups)
    assert evaluation.mean_accuracy == pytest.approx(correct / (SIZE * len(prompts)))


def test_prometheus_reads_the_state_of_open_runs(account: Account) -> None:
    client = account.client
    client.post_groups(1, "evaluation", encode_groups(account.driver.groups(1, "evaluation")))
    client.report_replica(
        "r0",
        wire.ReplicaReport(
            url="http://r0",
            state="serving",
            detail="",
            loaded_version=1,
            manifest_digest="",
            prompts_per_request=0,
        ),
    )

    def read() -> dict[str, dict[tuple[str, ...], float]]:
        text = httpx.get(f"{account.driver.stack.buffer_url}/metrics").text
        return {
            family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
            for family in text_string_to_metric_families(text)
        }

    before = read()
    assert before["bapo_current_step"][("queries",)] == STEPS
    assert 0 <= before["bapo_seconds_since_commit"][("queries",)] < 3600
    assert before["bapo_replicas"][("queries", "serving")] == 1
    bins = client.steps(after=STEPS - 1)[0].bins
    reward = sum(k * count for k, count in enumerate(bins)) / (SIZE * sum(bins))
    assert before["bapo_mean_reward"][("queries",)] == pytest.approx(reward)
    newest = client.evaluations()[-1]
    held_out = ("test", "queries")  # labels by their names
    assert before["bapo_held_out_accuracy"][held_out] == pytest.approx(newest.mean_accuracy)
    assert before["bapo_held_out_reward"][held_out] == pytest.approx(newest.mean_reward)
    client.stop()
    after = read()
    assert ("queries",) not in after["bapo_current_step"]
    assert after["bapo_runs"][("stopped",)] == before["bapo_runs"].get(("stopped",), 0) + 1
