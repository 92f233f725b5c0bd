"""Settings of the buffer service and of its migration, from environment variables."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from services.common.settings import ObjectStoreClientSettings, ServerSettings, Settings


def _with_driver(url: SecretStr) -> SecretStr:
    """Adds SQLAlchemy's name of the driver, which the URLs of other programs do not have."""
    scheme, separator, rest = url.get_secret_value().partition("://")
    if not separator or scheme not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise ValueError("it must have the form postgresql://user:password@host:port/database")
    return SecretStr(f"postgresql+psycopg://{rest}")


DatabaseUrl = Annotated[SecretStr, AfterValidator(_with_driver)]


class BufferSettings(ServerSettings, ObjectStoreClientSettings):
    """Settings of the buffer service (`python -m services.buffer.main`)."""

    database_url: DatabaseUrl
    """URL of Postgres, `postgresql://user:password@host:port/database`."""
    token: SecretStr
    """Bearer token that is accepted with scope `admin`; the processes of a run use it."""


class MigrationSettings(Settings):
    """Settings of the migration (`python -m services.buffer.migrate`)."""

    database_url: DatabaseUrl
    """URL of Postgres, `postgresql://user:password@host:port/database`."""
    migrate_within_s: float = Field(120.0, ge=0.0)
    """Seconds to wait for a database that does not accept connections yet."""
