"""Runs migrations on the database named by the caller; Alembic executes this file."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from services.buffer import version_table
from services.buffer.database import make_engine
from services.buffer.storage.tables import Base

LOCK = 0x6261706F
"""Key of the advisory lock ("bapo" in ASCII) that lets one process migrate at a time."""

engine = make_engine(context.config.attributes["database_url"])
with engine.begin() as connection:
    connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})
    version_table.take_over(connection)
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=version_table.VERSION_TABLE,
    )
    context.run_migrations()
    version_table.give_back(connection)
engine.dispose()
