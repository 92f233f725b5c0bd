"""The database goes away and comes back as another: calls get 503, and work again by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from psycopg.sql import SQL
from sqlalchemy.orm import sessionmaker

from services.buffer.database import OutageWatch, make_engine
from services.buffer.routes.admin import _check_database
from services.buffer.service import Service
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports
from tests.integration.support.driver import Driver, small_config
from tests.outside.servers import (
    BufferService,
    Postgres,
    await_true,
    buffer_service,
    check_message,
    open_directory,
    plain,
    postgres,
)


@pytest.fixture(scope="module")
def admin(stack: Endpoints) -> Iterator[psycopg.Connection]:
    with psycopg.connect(plain(stack.database_url), autocommit=True) as connection:
        connection.execute("create database failover")
        yield connection
        connection.execute("drop database failover with (force)")


@pytest.fixture(scope="module")
def service(
    stack: Endpoints, admin: psycopg.Connection, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BufferService]:
    url = stack.database_url.replace("/postgres?", "/failover?")
    with buffer_service(stack, tmp_path_factory.mktemp("failover"), database_url=url) as service:
        yield service


def test_a_demoted_server_is_left_for_the_primary(
    service: BufferService, admin: psycopg.Connection
) -> None:
    """A setting of the database stands for the server that has become a standby."""
    assert service.create_token().status_code == 201
    admin.execute("alter database failover set default_transaction_read_only = on")
    admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname='failover'")
    detail = refused(service)
    assert "read-only" in detail
    assert "the address leads to the primary" in detail
    assert "read-only" in not_ready(service)
    admin.execute("alter database failover reset default_transaction_read_only")
    assert service.create_token().status_code == 201
    assert service.ready()[0] == 200


def refused(service: BufferService) -> str:
    """Returns the reason for which a call that writes is refused."""
    answer = service.create_token()
    assert answer.status_code == 503
    return check_message(answer.json()["detail"])


def not_ready(service: BufferService) -> str:
    """Returns what the service says of its database while it is not ready."""
    status, body = service.ready()
    assert status == 503
    return check_message(json.loads(body)["database"])


def backends(connection: psycopg.Connection) -> set[int]:
    """Returns the ids of the server's processes for other connections to this database."""
    rows = connection.execute(
        "select pid from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    return {pid for (pid,) in rows}


def refuse_tokens(connection: psycopg.Connection, errcode: str, reason: str) -> None:
    """Has Postgres refuse every new token with an error, by a trigger `refuse`."""
    connection.execute(
        SQL(
            "create function refuse() returns trigger language plpgsql as $$ begin"
            " raise exception {} using errcode = {}; end $$"
        ).format(reason, errcode)
    )
    connection.execute("create trigger refuse before insert on api_token execute function refuse()")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("25006", "cannot execute INSERT in a read-only transaction"),
        ("57P01", "terminating connection due to administrator command"),
        ("57P03", "the database system is shutting down"),
        ("26000", 'prepared statement "_pg3_0" does not exist'),
        ("42P05", 'prepared statement "_pg3_0" already exists'),
        ("25P03", "terminating connection due to idle-in-transaction timeout"),
        ("08006", "server conn crashed?"),
        ("53300", "sorry, too many clients already"),
        ("58030", "could not read block 7: Input/output error"),
    ],
)
def test_connections_whose_server_has_become_unfit_are_dropped(
    service: BufferService, admin: psycopg.Connection, state: str, reason: str
) -> None:
    """They stay open behind a proxy, and a read that asks whether they live succeeds."""
    url = plain(service.endpoints.database_url)
    with psycopg.connect(url, autocommit=True) as connection:
        refuse_tokens(connection, state, reason)
        before = backends(connection)
        assert reason in refused(service)
        connection.execute("drop function refuse cascade")
        assert service.create_token().status_code == 201
        assert before
        assert not before & backends(connection)


def test_a_standby_that_the_address_accepts_is_not_ready(stack: Endpoints) -> None:
    """Without `target_session_attrs=any`, connections to a standby are refused."""
    url = f"{stack.database_url}&target_session_attrs=any"
    engine = make_engine(f"{url}&options=-cdefault_transaction_read_only%3Don")
    service = SimpleNamespace(sessions=sessionmaker(engine), outages=OutageWatch(engine))
    said = check_message(_check_database(cast(Service, service)))
    assert said.startswith("takes no writes; ")
    assert said.endswith("when the address leads to the primary")
    engine.dispose()


def test_a_full_disk_is_said_and_the_service_is_not_ready(service: BufferService) -> None:
    """Postgres raises the error by a trigger, because a test cannot fill its disk."""
    with psycopg.connect(plain(service.endpoints.database_url), autocommit=True) as connection:
        reason = 'could not extend file "base/5/16384": No space left on device'
        refuse_tokens(connection, "disk_full", reason)
        assert "No space left on device; free or add space" in refused(service)
        assert "No space left on device; free or add space" in not_ready(service)
        connection.execute("drop function refuse cascade")
        assert service.create_token().status_code == 201
        await_true(lambda: service.ready()[0] == 200, "the service is ready again")


@pytest.fixture
def pair() -> Iterator[tuple[Postgres, Postgres]]:
    """Yields a primary and its standby."""
    with (
        postgres() as primary,
        open_directory() as directory,
        reserve_ports(1) as (port,),
    ):
        standby = Postgres(directory, port)
        standby.copy(primary)
        standby.start()
        try:
            yield primary, standby
        finally:
            standby.stop()


def test_a_run_goes_on_with_the_standby_that_was_promoted(
    stack: Endpoints, pair: tuple[Postgres, Postgres], tmp_path: Path
) -> None:
    primary, standby = pair
    hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in pair)
    url = f"postgresql+psycopg://postgres@/postgres?{hosts}"
    with buffer_service(stack, tmp_path, database_url=url) as service:
        driver = Driver(service.endpoints, small_config("failover"))
        driver.run_step(1)
        primary.demote()
        refused(service)
        not_ready(service)
        standby.promote()
        driver.run_step(2)
        assert driver.client.run_state().current_step == 2
        assert service.ready()[0] == 200
