"""Migrates a database to the current schema; concurrent callers take turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import OperationalError, ProgrammingError, connect
from psycopg.errors import InsufficientPrivilege
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from bapo_core.errors import BapoError, ConfigError, TransientError
from services.buffer.database import (
    connection_arguments,
    describe_address,
    describe_outage,
    make_engine,
    may_be_repeated,
)
from services.buffer.settings import MigrationSettings
from services.buffer.version_table import find_version_table
from services.common.errors import first_line
from services.common.logs import configure_logs
from services.common.process import run_until_error

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0


def alembic_config(database_url: str) -> Config:
    config = Config()
    # configparser takes a percent sign for the beginning of a reference to another option.
    migrations = str(Path(__file__).parent / "migrations").replace("%", "%%")
    config.set_main_option("script_location", migrations)
    config.attributes["database_url"] = database_url
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    """Migrates to `revision`.

    Raises `BapoError` if the schema is newer than this version of bapo, which would misread it, or
    if the role may not change it, and `TransientError` while the database cannot serve.
    """
    with _explained(database_url):
        _refuse_newer(database_url)
        command.upgrade(alembic_config(database_url), revision)


def downgrade(database_url: str, revision: str) -> None:
    """Migrates back to `revision`; the migrations say what the older schema cannot hold.

    Raises as `upgrade` does.
    """
    with _explained(database_url):
        _refuse_newer(database_url)
        command.downgrade(alembic_config(database_url), revision)


@contextmanager
def _explained(database_url: str) -> Iterator[None]:
    """Turns what the database refuses into an error that has the remedy."""
    address, role = describe_address(database_url), make_url(database_url).username
    try:
        yield
    except DBAPIError as error:
        if may_be_repeated(error):
            raise TransientError(
                f"the database at {address} cannot be migrated now: {describe_outage(error)}"
            ) from error
        if not isinstance(error.orig, InsufficientPrivilege):
            raise
        reason, remedy = first_line(error.orig), f"make {role} the owner of bapo's tables"
        if "for schema" in reason:
            schema = reason.split()[-1]
            remedy = f"run `GRANT CREATE ON SCHEMA {schema} TO {role}` as the owner of the database"
        raise BapoError(
            f"the role {role} may not migrate the database at {address}: {reason}; {remedy}"
        ) from error


def _refuse_newer(database_url: str) -> None:
    script = ScriptDirectory.from_config(alembic_config(database_url))
    known = {migration.revision for migration in script.walk_revisions()}
    engine = make_engine(database_url)
    try:
        with engine.connect() as connection:
            options = {"version_table": find_version_table(connection)}
            heads = set(MigrationContext.configure(connection, opts=options).get_current_heads())
    finally:
        engine.dispose()
    if heads - known:
        raise BapoError(
            f"the database has schema revision {', '.join(sorted(heads - known))}, but this "
            f"version of bapo knows none after {script.get_current_head()}: a newer version has "
            "migrated it. Run that version, or restore a backup from before the migration"
        )


def await_database(database_url: str, seconds: float) -> None:
    """Waits until the database accepts connections.

    Raises `BapoError`, with the reason, if it does not within `seconds`, or cannot store Unicode.
    """
    address = describe_address(database_url)
    deadline = time.monotonic() + seconds
    while True:
        try:
            encoding = _read_encoding(database_url)
            break
        except OperationalError as error:
            reason = first_line(error)
            if time.monotonic() > deadline:
                raise BapoError(
                    f"the database at {address} did not accept a connection within "
                    f"{seconds:.0f} s: {reason}; check the address, the credentials, and that the "
                    "network allows the connection"
                ) from error
            log.info("waiting for the database: %s", reason)
            time.sleep(POLL_INTERVAL_S)
        except ProgrammingError as error:
            raise ConfigError(
                f"BAPO_DATABASE_URL: {first_line(error)}; correct it: what follows the question "
                "mark are parameters of libpq"
            ) from error
    if encoding != "UTF8":
        raise BapoError(
            f"the database at {address} has the encoding {encoding}, which cannot store all texts; "
            "create it with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
        )


def _read_encoding(database_url: str) -> str | None:
    """Returns the encoding of a database. Raises psycopg's `OperationalError`.

    SQLAlchemy cannot be asked: it fails to connect to a database of the encoding SQL_ASCII.
    """
    arguments, options = connection_arguments(database_url)
    with connect(*arguments, **{"connect_timeout": 5, **options}) as connection:
        return connection.info.parameter_status("server_encoding")


def main() -> None:
    """Waits for the database (`BAPO_MIGRATE_WITHIN_S`, default 120 s) and migrates it.

    Runs as `python -m services.buffer.migrate`, which the chart's Job does before an upgrade.
    """
    configure_logs("migrate")

    def migrate_database() -> None:
        settings = MigrationSettings.load()
        database_url = settings.database_url.get_secret_value()
        await_database(database_url, settings.migrate_within_s)
        upgrade(database_url)
        log.info("the schema is current")

    run_until_error(migrate_database)


if __name__ == "__main__":
    main()
