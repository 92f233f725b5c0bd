"""A run whose stored configuration is invalid: clients refuse it, the service still lists it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psycopg
import pytest

from bapo_core.errors import ConfigError
from services.stack.stack import Endpoints
from tests.integration.driver import Driver, small_config


@pytest.fixture
def unreadable(stack: Endpoints) -> Iterator[Driver]:
    """A run that a later version cannot read, because a key is unknown to it."""
    driver = Driver(stack, small_config("unreadable"))
    with psycopg.connect(stack.database_url.replace("+psycopg", "")) as connection:
        connection.execute(
            """update run set config = config || '{"x9": {}}' where name = 'unreadable'"""
        )
    yield driver
    with pytest.raises(ConfigError):  # it has stopped the run; only the answer is refused
        driver.client.stop()
    driver.client.delete_run()
    assert "unreadable" not in {run.name for run in driver.client.runs()}


def test_clients_name_the_run_the_key_and_the_remedy(unreadable: Driver) -> None:
    for call in (unreadable.client.run_state, unreadable.client.runs):
        with pytest.raises(ConfigError, match="x9: no such key") as caught:
            call()
        assert "run 'unreadable'" in str(caught.value)
        assert "`bapo delete unreadable`" in str(caught.value)


def test_the_service_sends_the_configuration_as_it_is_stored(unreadable: Driver) -> None:
    stored = unreadable.config.model_dump(mode="json") | {"x9": {}}
    headers = {"Authorization": f"Bearer {unreadable.stack.token}"}
    url = f"{unreadable.stack.buffer_url}/v1/runs"
    assert httpx.get(f"{url}/unreadable", headers=headers).json()["config"] == stored
    listed = httpx.get(url, params={"search": "unreadable"}, headers=headers).json()["items"]
    assert [run["config"] for run in listed] == [stored]
