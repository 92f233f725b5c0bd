"""The digest chain notices whatever was changed after a commit."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.digest_chain import (
    check_chain,
    digest_change,
    digest_configuration,
    link,
)

CONFIG = {"seed": 1}


def digests(step: int, **changes: Any) -> wire.StepDigests:
    values = {
        "weights_before": f"{step:064x}",
        "batch": f"{1000 + step:064x}",
        "weights_after": f"{step + 1:064x}",
        "code": "1.0+abc",
        "processes": 1,
        "platform": "cpu",
    }
    return wire.StepDigests(**values | changes)


def view(step: int, found: wire.ChainLink | None) -> wire.StepView:
    return wire.StepView(
        step=step,
        r_tot=0.5,
        c2=0.0,
        c3=1.0,
        counts={},
        rollouts=0,
        tokens=0,
        metrics={},
        bins=[],
        mean_reward=0.0,
        reward_parts={},
        committed_at=datetime.now(UTC),
        digests=found,
    )


def chain(steps: int = 4) -> list[wire.StepView]:
    views: list[wire.StepView] = []
    previous = None
    for step in range(1, steps + 1):
        found = link(previous, CONFIG, step, digests(step))
        previous = found.chain
        views.append(view(step, found))
    return views


def test_a_whole_chain_is_accepted_from_any_step_on() -> None:
    check_chain(CONFIG, chain())
    check_chain(CONFIG, chain()[2:])
    check_chain(CONFIG, [])


@pytest.mark.parametrize(
    "change",
    [
        {"weights_before": "0" * 64},
        {"batch": "0" * 64},
        {"weights_after": "0" * 64},
        {"code": "other"},
        {"processes": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_digest_breaks_the_chain(change: dict[str, Any]) -> None:
    views = chain()
    assert views[1].digests is not None
    views[1] = view(2, views[1].digests.model_copy(update=change))
    with pytest.raises(BapoError, match="the digest chain breaks at step 2"):
        check_chain(CONFIG, views)


def test_the_platform_may_change() -> None:
    other = link(None, CONFIG, 1, digests(1, platform="another"))
    assert other.chain == link(None, CONFIG, 1, digests(1)).chain


def test_another_configuration_breaks_the_chain_at_the_first_step() -> None:
    with pytest.raises(BapoError, match="the digest chain breaks at step 1"):
        check_chain({"seed": 2}, chain())


def test_a_step_that_was_exchanged_breaks_the_chain_after_it() -> None:
    views = chain()
    views[1] = view(2, link("f" * 64, CONFIG, 2, digests(2)))
    with pytest.raises(BapoError, match="the digest chain breaks at step 2"):
        check_chain(CONFIG, views)


def test_a_step_without_digests_is_named() -> None:
    views = chain()
    views[2] = view(3, None)
    with pytest.raises(BapoError, match="step 3 has no link in the digest chain"):
        check_chain(CONFIG, views)


def test_weights_that_changed_between_two_steps_are_named() -> None:
    first = link(None, CONFIG, 1, digests(1))
    second = link(first.chain, CONFIG, 2, digests(2, weights_before="a" * 64))
    with pytest.raises(BapoError, match="step 2 did not begin with the weights that step 1"):
        check_chain(CONFIG, [view(1, first), view(2, second)])


def changed(*changes: tuple[int, int], config: dict[str, Any]) -> list[wire.RecordedChange]:
    """Returns changes of `steps`, as (first step, new value), with their digests."""
    recorded: list[wire.RecordedChange] = []
    previous = digest_configuration(config, [], 0)
    for first_step, steps in changes:
        change = wire.RecordedChange(
            first_step=first_step,
            old={"steps": recorded[-1].new["steps"] if recorded else config["steps"]},
            new={"steps": steps},
            attempt=len(recorded) + 2,
            by="alice",
            at=datetime(2026, 1, 1, tzinfo=UTC),
            digest="0" * 64,
        )
        previous = digest_change(previous, change)
        recorded.append(change.model_copy(update={"digest": previous}))
    return recorded


def chain_with(changes: list[wire.RecordedChange], config: dict[str, Any]) -> list[wire.StepView]:
    views: list[wire.StepView] = []
    previous = None
    for step in range(1, 7):
        found = link(previous, config, step, digests(step), changes)
        previous = found.chain
        views.append(view(step, found))
    return views


def test_the_chain_holds_the_changes_of_the_configuration() -> None:
    initial, current = {"seed": 1, "steps": 3}, {"seed": 1, "steps": 6}
    changes = changed((4, 5), (6, 6), config=initial)
    views = chain_with(changes, initial)
    check_chain(current, views, changes)
    check_chain(initial, views, changes)
    unchanged = chain_with([], initial)
    assert [
        step.digests == other.digests for step, other in zip(views, unchanged, strict=True)
    ] == ([True] * 3 + [False] * 3)
    with pytest.raises(BapoError, match="breaks at step 4"):
        check_chain(initial, views)
    with pytest.raises(BapoError, match="breaks at step 6"):
        check_chain({"seed": 1, "steps": 5}, views, changes[:1])


@pytest.mark.parametrize(
    "forged",
    [
        {"new": {"steps": 7}},
        {"old": {"steps": 2}},
        {"first_step": 5},
        {"by": "mallory"},
        {"attempt": 9},
        {"at": datetime(2027, 1, 1, tzinfo=UTC)},
    ],
)
def test_a_change_that_was_forged_afterwards_is_found(forged: dict[str, Any]) -> None:
    config = {"seed": 1, "steps": 3}
    changes = changed((4, 5), (6, 6), config=config)
    views = chain_with(changes, config)
    changes[1] = changes[1].model_copy(update=forged)
    with pytest.raises(BapoError, match="breaks at change 2 of the configuration, from step"):
        check_chain(config, views, changes)


def test_a_change_that_is_removed_breaks_the_changes_after_it() -> None:
    config = {"seed": 1, "steps": 3}
    changes = changed((4, 5), (6, 6), config=config)
    with pytest.raises(BapoError, match="breaks at change 1 of the configuration"):
        check_chain(config, [], changes[1:])
