"""The schema on the real server: up, down, and the same as the tables say."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from alembic import command
from sqlalchemy import create_engine, inspect

from services.buffer.migrate import alembic_config, downgrade, upgrade
from services.buffer.tables import Base
from services.local.stack import Endpoints


@pytest.fixture
def database(stack: Endpoints) -> Iterator[str]:
    """An empty database of its own."""
    admin = stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("create database migrations")
        yield stack.database_url.replace("/postgres?", "/migrations?")
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
