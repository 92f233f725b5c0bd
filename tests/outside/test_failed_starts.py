"""A process that fails to start prints the reason and the remedy in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import services
from services.buffer.migrate import upgrade
from services.common.process import EXIT_RETRYABLE, find_error
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports
from tests.outside.servers import check_message, empty_database, plain, postgres


@pytest.fixture
def database(stack: Endpoints) -> Iterator[str]:
    """Creates an empty database and returns its URL."""
    with empty_database(stack, "failing") as url:
        yield url


def start(module: str, stack: Endpoints, **variables: str) -> tuple[int, str]:
    """Runs a module that fails. Returns its exit code and the error that people are shown."""
    with reserve_ports(1) as (port,):
        result = subprocess.run(
            [sys.executable, "-P", "-m", module],
            env={**os.environ, **stack.environment(), "BAPO_PORT": str(port), **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "Traceback" not in result.stderr
    return result.returncode, check_message(find_error(result.stderr))


def test_a_newer_schema_is_the_reason_of_the_service(stack: Endpoints, database: str) -> None:
    upgrade(database)
    with psycopg.connect(plain(database), autocommit=True) as connection:
        connection.execute("update bapo_version set version_num = '9999'")
    code, error = start("services.buffer.main", stack, BAPO_DATABASE_URL=database)
    assert code == 1
    assert "the database has schema revision 9999" in error
    assert "Run that version" in error


def test_a_role_without_rights_is_told_what_to_grant(stack: Endpoints) -> None:
    """Since Postgres 15, only the owner of a database may create tables in the schema public."""
    with postgres() as server:
        server.execute("create role app login")
        url = server.url().replace("//postgres@", "//app@")
        for module in ("services.buffer.migrate", "services.buffer.main"):
            code, error = start(module, stack, BAPO_DATABASE_URL=url)
            assert code == 1
            assert "permission denied for schema public" in error
            assert "`GRANT CREATE ON SCHEMA public TO app`" in error


def test_a_database_that_is_away_is_worth_a_restart(stack: Endpoints) -> None:
    url = "postgresql://bapo:secret@127.0.0.1:1/bapo"
    code, error = start("services.buffer.main", stack, BAPO_DATABASE_URL=url)
    assert code == EXIT_RETRYABLE
    assert "cannot be migrated now" in error
    assert "refused" in error
    assert "secret" not in error


def test_an_unknown_parameter_of_the_database_is_named(stack: Endpoints) -> None:
    url = "postgresql://bapo:secret@127.0.0.1:1/bapo?sslmod=require"
    code, error = start("services.buffer.migrate", stack, BAPO_DATABASE_URL=url)
    assert code == 1
    assert 'invalid connection option "sslmod"' in error
    assert "parameters of libpq" in error


def test_a_checkout_may_have_a_percent_sign_in_its_path(tmp_path: Path) -> None:
    """Jenkins names the workspaces of branches `feature%2Fx`."""
    checkout = tmp_path / "feature%2Fx"
    root = Path(next(iter(services.__path__))).parent
    for package in ("services", "bapo_core"):
        shutil.copytree(
            root / package,
            checkout / package,
            ignore=shutil.ignore_patterns("__pycache__", "tiny*"),
        )
    program = (
        "from alembic.script import ScriptDirectory;"
        "from services.buffer.migrate import alembic_config;"
        "print(ScriptDirectory.from_config(alembic_config('postgresql+psycopg://')).dir)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True
    )
    assert result.stdout.strip() == str(checkout / "services/buffer/migrations"), result.stderr


def test_the_hint_of_postgres_is_a_part_of_its_reason() -> None:
    log = (
        '2026-11-27 10:00:00.000 UTC [7] FATAL:  lock file "postmaster.pid" already exists\n'
        "2026-11-27 10:00:00.000 UTC [7] HINT:  Is another postmaster running?\n"
        "2026-11-27 10:00:00.000 UTC [7] LOG:  database system is shut down\n"
    )
    assert find_error(log) == (
        'FATAL:  lock file "postmaster.pid" already exists; HINT:  Is another postmaster running?'
    )
