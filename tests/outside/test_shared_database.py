"""bapo and other programs that use Alembic, MLflow for one, share a database."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import create_engine, inspect, text

from bapo_core.errors import BapoError
from services.buffer.migrate import downgrade, upgrade
from services.buffer.storage.tables import Base
from services.stack.stack import Endpoints
from tests.outside.servers import check_message, empty_database, plain


@pytest.fixture
def database(stack: Endpoints) -> Iterator[str]:
    """Creates an empty database and returns its URL."""
    with empty_database(stack, "shared") as url:
        yield url


def install_mlflow(database: str) -> None:
    """Creates MLflow's tables as its server does when it starts."""
    from mlflow.store.db.utils import _initialize_tables

    engine = create_engine(database)
    _initialize_tables(engine)
    engine.dispose()


def tables(database: str) -> set[str]:
    engine = create_engine(database)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def query(database: str, statement: str) -> list[str]:
    with psycopg.connect(plain(database), autocommit=True) as connection:
        cursor = connection.execute(statement)  # type: ignore[call-overload]
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


def test_bapo_moves_in_with_mlflow(database: str) -> None:
    install_mlflow(database)
    theirs = query(database, "select version_num from alembic_version")
    upgrade(database)
    upgrade(database)
    assert query(database, "select version_num from alembic_version") == theirs
    assert {*Base.metadata.tables, "experiments", "runs", "bapo_version"} <= tables(database)


def test_mlflow_moves_in_with_bapo(database: str) -> None:
    upgrade(database)
    own = query(database, "select version_num from bapo_version")
    install_mlflow(database)
    upgrade(database)
    assert query(database, "select version_num from bapo_version") == own
    assert {*Base.metadata.tables, "experiments", "runs", "alembic_version"} <= tables(database)


def test_the_revision_of_an_earlier_version_is_taken_over_with_all_data(database: str) -> None:
    """Versions before 0032 recorded it in `alembic_version`, under which a downgrade leaves it."""
    upgrade(database, "0031")
    assert query(database, "select version_num from alembic_version") == ["0031"]
    assert "bapo_version" not in tables(database)
    query(database, "insert into stored_config (name, text) values ('kept', 'steps: 1')")
    upgrade(database)
    assert "alembic_version" not in tables(database)
    assert query(database, "select name from stored_config") == ["kept"]
    revision = query(database, "select version_num from bapo_version")
    install_mlflow(database)
    with pytest.raises(BapoError, match="that of another program is in this database") as caught:
        downgrade(database, "0031")
    check_message(str(caught.value))
    assert query(database, "select name from stored_config") == ["kept"]
    # It went back to the last revision that records itself in the table of its own.
    assert revision >= query(database, "select version_num from bapo_version") >= ["0032"]


def test_a_downgrade_leaves_the_revision_where_the_earlier_version_looks(database: str) -> None:
    upgrade(database)
    downgrade(database, "0031")
    assert query(database, "select version_num from alembic_version") == ["0031"]
    assert "bapo_version" not in tables(database)


def test_another_programs_numbered_revisions_are_left_alone(database: str) -> None:
    engine = create_engine(database)
    with engine.begin() as connection:
        connection.execute(text("create table alembic_version (version_num varchar(32))"))
        connection.execute(text("insert into alembic_version values ('0031')"))
    engine.dispose()
    upgrade(database)
    assert query(database, "select version_num from alembic_version") == ["0031"]
    assert set(Base.metadata.tables) <= tables(database)
