"""Runs migrations on the database named by the caller; Alembic executes this file."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, text

from services.buffer.storage.tables import Base

LOCK = 0x6261706F
"""Key of the advisory lock ("bapo" in ASCII) that lets one process migrate at a time."""

engine = create_engine(context.config.attributes["database_url"])
with engine.begin() as connection:
    connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})
    context.configure(connection=connection, target_metadata=Base.metadata)
    context.run_migrations()
engine.dispose()
