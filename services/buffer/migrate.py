"""Brings a database to the current schema. Replicas that start together take turns."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from bapo_core.errors import BapoError
from services.buffer.settings import MigrationSettings
from services.common.logs import configure_logs
from services.common.process import run_until_error

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


def alembic_config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["database_url"] = database_url
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    """`BapoError` if the schema is of a newer version than this code: it would be misread."""
    _refuse_newer(database_url)
    command.upgrade(alembic_config(database_url), revision)


def downgrade(database_url: str, revision: str) -> None:
    """Goes back; what the older schema cannot hold is lost, as the migration says."""
    _refuse_newer(database_url)
    command.downgrade(alembic_config(database_url), revision)


def _refuse_newer(database_url: str) -> None:
    script = ScriptDirectory.from_config(alembic_config(database_url))
    known = {each.revision for each in script.walk_revisions()}
    engine = create_engine(database_url)
    try:
        with engine.connect() as connection:
            found = set(MigrationContext.configure(connection).get_current_heads())
    finally:
        engine.dispose()
    if found - known:
        raise BapoError(
            f"the database has schema revision {', '.join(sorted(found - known))}, but this "
            f"version of bapo knows none after {script.get_current_head()}: a newer one has "
            "migrated it. Run that version, or restore a backup from before"
        )


def await_database(database_url: str, seconds: float) -> None:
    """Returns once the database accepts us; `BapoError` if it has not within `seconds`."""
    engine = create_engine(database_url, connect_args={"connect_timeout": 5})
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                engine.connect().close()
                return
            except OperationalError as error:
                reason = str(error.orig).strip().splitlines()[0]
                if time.monotonic() > deadline:
                    raise BapoError(
                        f"the database at {engine.url.render_as_string(hide_password=True)} did "
                        f"not accept us within {seconds:.0f} s: {reason}; check the address, the "
                        "credentials, and that the network lets us through"
                    ) from error
                log.info("waiting for the database: %s", reason)
                time.sleep(LOOK_EVERY_S)
    finally:
        engine.dispose()


def main() -> None:
    """`python -m services.buffer.migrate`: waits for the database (`BAPO_MIGRATE_WITHIN_S`, 120
    seconds) and brings it to the current schema."""
    configure_logs("migrate")

    def work() -> None:
        settings = MigrationSettings.load()
        database_url = settings.database_url.get_secret_value()
        await_database(database_url, settings.migrate_within_s)
        upgrade(database_url)
        log.info("the schema is current")

    run_until_error(work)


if __name__ == "__main__":
    main()
