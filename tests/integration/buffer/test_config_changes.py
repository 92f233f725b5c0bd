"""Changes of a run's configuration in the buffer service."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from services.buffer.api.digest_chain import check_changes
from services.common.errors import ServiceError, Superseded
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config

_NUMBERS = count()


@pytest.fixture
def driver(stack: Endpoints) -> Driver:
    """Creates a run of 12 steps, of which 5 are trained and 4 are in a checkpoint."""
    driver = Driver(stack, small_config(f"reconfigured-{next(_NUMBERS)}"))
    for step in range(1, 6):
        driver.run_step(step)
        if step == 4:
            driver.client.record_checkpoint(4, "c" * 64)
    return driver


def test_a_change_holds_from_the_step_after_the_last_checkpoint_on(driver: Driver) -> None:
    before = driver.client.run_state()
    state = driver.client.change_config({"steps": 20, "checkpoint.every": 3}, by="alice")
    assert (state.current_step, state.attempt) == (4, before.attempt + 1)
    assert (state.config.steps, state.config.checkpoint.every) == (20, 3)
    (change,) = state.changes
    assert (change.first_step, change.attempt, change.by) == (5, state.attempt, "alice")
    assert change.old == {"steps": 12, "checkpoint.every": 2}
    assert change.new == {"steps": 20, "checkpoint.every": 3}
    assert state.history.at(4) == before.config
    with pytest.raises(Superseded):
        driver.client.step_prompts(6)
    check_changes(driver.client.stored_config(), state.changes)


def test_the_same_change_again_changes_nothing(driver: Driver) -> None:
    state = driver.client.change_config({"steps": 20})
    assert driver.client.change_config({"steps": 20}) == state
    assert driver.client.run_state() == state


def test_a_step_is_asked_for_by_its_own_configuration(driver: Driver) -> None:
    driver.client.change_config({"steps": 6, "evaluation.every": 5})
    driver.client.begin_attempt()
    prompts = driver.client.step_prompts
    assert prompts(4, "evaluation").policy_version == 4, "as was due before the change"
    assert prompts(5, "evaluation").policy_version == 5
    assert prompts(7, "evaluation").policy_version == 7, "of the final weights"
    for version in (6, 8):
        with pytest.raises(ServiceError, match=r"is not evaluated on test|is not in 1\.\.7"):
            prompts(version, "evaluation")
    with pytest.raises(ServiceError, match=r"step 7 is not in 1\.\.6, the steps of this run"):
        prompts(7)


def test_a_finished_run_that_gets_more_steps_waits_for_a_new_attempt(driver: Driver) -> None:
    driver.client.record_checkpoint(5, "d" * 64)
    assert driver.client.change_config({"steps": 5}).status == "running"
    driver.client.begin_attempt()
    driver.client.set_status("finished")
    with pytest.raises(ServiceError, match="has trained 5 of 5 steps; train longer as well"):
        driver.client.change_config({"optimizer.learning_rate": 1e-5})
    state = driver.client.change_config({"steps": 8, "optimizer.learning_rate": 1e-5}, by="alice")
    assert (state.status, state.current_step) == ("stopped", 5)
    assert state.stopped is not None
    assert state.stopped.describe() == (
        "alice: its configuration was changed: optimizer.learning_rate 1e-06 -> 1e-05, steps 5 -> 8"
    )
    assert driver.client.begin_attempt(reopen=True).status == "running"
    driver.run_step(6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 9}, "cannot change seed=9"),
        ({"steps": 3}, "steps=3 is below the 4 steps"),
        ({"steps": "many"}, "steps: input should be a valid integer"),
        ({"no.such.key": 1}, "no"),
    ],
)
def test_a_change_that_is_refused_leaves_the_run_alone(
    driver: Driver, values: dict[str, Any], message: str
) -> None:
    before = driver.client.run_state()
    with pytest.raises(ServiceError, match=message) as refused:
        driver.client.change_config(values)
    assert refused.value.status == 422
    assert driver.client.run_state() == before
    driver.run_step(6)


def test_a_run_that_has_not_begun_is_changed_from_its_first_step_on(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("changed-at-once"))
    change = driver.client.change_config({"steps": 3}).changes[0]
    assert change.first_step == 1
    driver.client.begin_attempt()
    driver.run_step(1)
