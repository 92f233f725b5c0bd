"""The schema on the real server: up and down with data, and the same as the tables say."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from alembic import command
from sqlalchemy import create_engine, inspect

from bapo_core.errors import BapoError
from services.buffer import migrate
from services.buffer.api.trajectories import encode_groups
from services.buffer.migrate import alembic_config, downgrade, upgrade
from services.buffer.tables import Base
from services.stack.stack import Endpoints
from tests.integration.driver import Driver, made_up_group, small_config


def plain(url: str) -> str:
    return url.replace("postgresql+psycopg", "postgresql")


@pytest.fixture
def database(stack: Endpoints) -> Iterator[str]:
    """An empty database of its own."""
    own = stack.database_url.replace("/postgres?", "/migrations?")
    with psycopg.connect(plain(stack.database_url), autocommit=True) as connection:
        connection.execute("create database migrations")
    yield own
    with psycopg.connect(plain(stack.database_url), autocommit=True) as connection:
        connection.execute("drop database migrations with (force)")


def test_up_down_up(database: str) -> None:
    upgrade(database)
    engine = create_engine(database)
    assert set(Base.metadata.tables) <= set(inspect(engine).get_table_names())
    downgrade(database, "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    upgrade(database)
    assert set(Base.metadata.tables) <= set(inspect(engine).get_table_names())
    engine.dispose()


def test_migrations_and_tables_agree(database: str) -> None:
    upgrade(database)
    command.check(alembic_config(database))


def test_a_newer_schema_is_refused(database: str) -> None:
    upgrade(database)
    with psycopg.connect(plain(database), autocommit=True) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    with pytest.raises(BapoError, match=r"schema revision 9999, .* a newer one has migrated it"):
        upgrade(database)


def rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything in the database, but the times of tokens' use."""
    found = {}
    with psycopg.connect(plain(url)) as connection:
        for table in sorted(Base.metadata.tables):
            cursor = connection.execute(f"select t::text from {table} t order by 1")  # type: ignore[arg-type]
            found[table] = list(cursor)
    return found


def test_down_and_up_again_with_data(stack: Endpoints, database: str) -> None:
    """What 0002 derives from older rows is what the service wrote as it went along."""
    driver = Driver(stack, small_config("migrated", steps=70))
    for step in range(1, 67):
        driver.run_step(step)
    evaluated = [
        made_up_group(prompt.uid, 1, size=4, rng=random.Random(prompt.uid))
        for prompt in driver.client.step_prompts(1, "evaluation").prompts
    ]
    driver.client.post_groups(1, "evaluation", encode_groups(evaluated))
    driver.roll_out(67)
    driver.client.batch(67)
    copy_database(stack, "migrations")
    with psycopg.connect(plain(database)) as connection:
        # The older schema knows no such runs: going back makes them failed ones.
        connection.execute(
            "update run set status = 'failed' where status in ('paused', 'stopped', 'deleting')"
        )
        # What rollout replicas and collectors say anew every few seconds.
        connection.execute("delete from replica")
        # The older schema cannot hold who did what when: going back forgets it.
        connection.execute("delete from span")
        connection.execute("update run set target_version = 0")
    before = rows(database)
    assert before["difficulty_snapshot"]
    assert before["evaluation"]
    downgrade(database, "0001")
    upgrade(database)
    after = rows(database)
    # The names of tokens and the revoked ones are all that going back loses.
    for table in before:
        if table != "api_token":
            assert after[table] == before[table], table


def copy_database(stack: Endpoints, name: str) -> None:
    """Makes `name` a copy of the stack's database. That one must have no connections meanwhile."""
    template1 = plain(stack.database_url).replace("/postgres?", "/template1?")
    with psycopg.connect(template1, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")  # type: ignore[arg-type]
        connection.execute("alter database postgres allow_connections false")
        try:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'postgres'"
            )
            connection.execute(f"create database {name} template postgres")  # type: ignore[arg-type]
        finally:
            connection.execute("alter database postgres allow_connections true")


def test_a_database_that_is_away_is_waited_for_and_then_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the chart's Job does before an installation, and says if it cannot."""
    monkeypatch.setattr(migrate, "LOOK_EVERY_S", 0.05)
    url = "postgresql+psycopg://bapo:secret@127.0.0.1:1/bapo"
    with caplog.at_level("INFO"), pytest.raises(BapoError) as caught:
        migrate.await_database(url, 0.2)
    assert "127.0.0.1:1/bapo did not accept us" in str(caught.value)
    assert "check the address, the credentials" in str(caught.value)
    assert "secret" not in str(caught.value) + caplog.text
    assert "waiting for the database" in caplog.text


def test_the_jobs_command_migrates(stack: Endpoints) -> None:
    environment = {**os.environ, "BAPO_DATABASE_URL": stack.database_url}
    done = subprocess.run(
        [sys.executable, "-m", "services.buffer.migrate"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "the schema is current" in done.stderr + done.stdout
