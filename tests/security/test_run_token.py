"""An attacker with a token of scope run."""

from __future__ import annotations

import pytest

from services.buffer.api.client import BufferClient
from services.common.errors import ServiceError
from services.stack.stack import Endpoints
from tests.integration.driver import Driver, small_config


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    driver = Driver(stack, small_config("attacked"))
    driver.run_step(1)
    driver.run_step(2)
    return driver


@pytest.fixture(scope="module")
def attacker(driver: Driver) -> BufferClient:
    token = driver.client.create_token("attacker", "run").token
    client = BufferClient(driver.stack.buffer_url, token, run=driver.config.name)
    client.attempt = driver.client.attempt
    return client


def test_a_recorded_checkpoint_is_not_replaced(driver: Driver, attacker: BufferClient) -> None:
    driver.client.record_checkpoint(1, "a" * 64)
    driver.client.record_checkpoint(1, "a" * 64)  # The first answer was lost.
    with pytest.raises(ServiceError, match=r"step 1 .* has a checkpoint with another digest"):
        attacker.record_checkpoint(1, "b" * 64)
    recorded = driver.client.latest_checkpoint()
    assert recorded is not None
    assert recorded.manifest_digest == "a" * 64


def test_a_trainer_learns_that_its_checkpoint_was_anticipated(
    driver: Driver, attacker: BufferClient
) -> None:
    attacker.record_checkpoint(2, "b" * 64)
    with pytest.raises(ServiceError, match=r"find out who has a token .*bapo token revoke"):
        driver.client.record_checkpoint(2, "a" * 64)
