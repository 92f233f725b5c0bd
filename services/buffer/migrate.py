"""Brings a database to the current schema. Replicas that start together take turns."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from services.common.errors import BapoError


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
