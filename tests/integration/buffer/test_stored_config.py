"""A run whose stored configuration is invalid can be listed and deleted; its use is refused."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psycopg
import pytest
from click.testing import CliRunner

from bapo_core.errors import ConfigError
from services.cli.main import bapo
from services.common.errors import ServiceError
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config


@pytest.fixture
def unreadable(stack: Endpoints) -> Iterator[Driver]:
    """A run that a later version cannot read, because a key is unknown to it."""
    driver = Driver(stack, small_config("unreadable"))
    with psycopg.connect(stack.database_url.replace("+psycopg", "")) as connection:
        connection.execute(
            """update run set config = config || '{"x9": {}}' where name = 'unreadable'"""
        )
    yield driver
    assert driver.client.stop().status == "stopped"
    driver.client.delete_run()
    assert "unreadable" not in {run.name for run in driver.client.runs()}


def test_clients_name_the_run_the_key_and_the_remedy(unreadable: Driver) -> None:
    (listed,) = [run for run in unreadable.client.runs() if run.name == "unreadable"]
    for state in (unreadable.client.run_state(), listed):
        assert state.steps is None
        assert state.model_dump(mode="json")["config"]["x9"] == {}
        with pytest.raises(ConfigError, match="x9: no such key") as caught:
            _ = state.config.rollout
        assert "run 'unreadable'" in str(caught.value)
        assert "`bapo delete unreadable`" in str(caught.value)


def test_the_state_of_a_run_that_did_not_change_equals_itself(unreadable: Driver) -> None:
    """A program that compares two readings of a run finds the run unchanged."""
    before = unreadable.client.run_state()
    assert unreadable.client.run_state() == before
    unreadable.client.stop()
    assert unreadable.client.run_state() != before
    with psycopg.connect(unreadable.stack.database_url.replace("+psycopg", "")) as connection:
        connection.execute(
            """update run set config = config || '{"x8": {}}' where name = 'unreadable'"""
        )
    assert unreadable.client.run_state().config != before.config


def test_the_service_sends_the_configuration_as_it_is_stored(unreadable: Driver) -> None:
    stored = unreadable.config.model_dump(mode="json") | {"x9": {}}
    headers = {"Authorization": f"Bearer {unreadable.stack.token}"}
    url = f"{unreadable.stack.buffer_url}/v1/runs"
    assert httpx.get(f"{url}/unreadable", headers=headers).json()["config"] == stored
    listed = httpx.get(url, params={"search": "unreadable"}, headers=headers).json()["items"]
    assert [run["config"] for run in listed] == [stored]


def test_the_service_says_what_it_cannot_read(unreadable: Driver) -> None:
    with pytest.raises(ServiceError, match=r"x9: no such key.*install the package again"):
        unreadable.client.step_prompts(1)


def test_other_runs_are_not_hidden_by_one_without_its_plug_in(
    unreadable: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_BUFFER_URL", unreadable.stack.buffer_url)
    monkeypatch.setenv("BAPO_TOKEN", unreadable.stack.token)
    result = CliRunner().invoke(bapo, ["runs"])
    assert result.exit_code == 0, result.output
    assert "unreadable" in result.output
    assert "0/?" in result.output
