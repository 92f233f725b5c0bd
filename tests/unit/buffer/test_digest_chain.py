"""The digest chain notices whatever was changed after a commit."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.digest_chain import check_chain, link

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
