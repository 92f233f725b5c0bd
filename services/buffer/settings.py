"""Settings of the buffer service and of its migration, from environment variables."""

from __future__ import annotations

from pydantic import Field, SecretStr

from services.common.settings import ObjectStoreClientSettings, ServerSettings, Settings


class BufferSettings(ServerSettings, ObjectStoreClientSettings):
    """Settings of the buffer service (`python -m services.buffer.main`)."""

    database_url: SecretStr
    """SQLAlchemy URL of Postgres, `postgresql+psycopg://user:password@host:port/database`."""
    token: SecretStr
    """Bearer token that is accepted with scope `admin`; the processes of a run use it."""


class MigrationSettings(Settings):
    """Settings of the migration (`python -m services.buffer.migrate`)."""

    database_url: SecretStr
    """SQLAlchemy URL of Postgres, `postgresql+psycopg://user:password@host:port/database`."""
    migrate_within_s: float = Field(120.0, ge=0.0)
    """Seconds to wait for a database that does not accept connections yet."""
