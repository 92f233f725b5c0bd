"""Settings of the buffer service and of its migration, from environment variables."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from services.common.scopes import Scope
from services.common.settings import ObjectStoreClientSettings, ServerSettings, Settings, Token


def _with_driver(url: SecretStr) -> SecretStr:
    """Adds SQLAlchemy's name of the driver, which the URLs of other programs do not have."""
    scheme, separator, rest = url.get_secret_value().partition("://")
    if not separator or scheme not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise ValueError("it must have the form postgresql://user:password@host:port/database")
    if rest.count("@") > 1:
        # What follows the first one would be taken for the host, which messages show.
        raise ValueError(
            "it has more than one @; in user and password, write @ as %40, / as %2F, : as %3A, "
            "? as %3F, # as %23 and % as %25"
        )
    return SecretStr(f"postgresql+psycopg://{rest}")


def _check_root_path(path: str) -> str:
    """Returns the path. Raises `ValueError` for one that requests cannot be told apart by."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("it must have the form /team/bapo, without a slash at its end")
    first = path.split("/")[1]
    if first in OWN_PATHS or {".", ".."} & set(path.split("/")):
        raise ValueError(f"/{first} is a path of the service itself; choose another one")
    return path


OWN_PATHS = ("v1", "dashboard", "docs", "openapi.json", "health", "readyz", "metrics")
"""First parts of the paths that the service serves."""
RootPath = Annotated[str, AfterValidator(_check_root_path)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_with_driver)]


class BufferSettings(ServerSettings, ObjectStoreClientSettings):
    """Settings of the buffer service (`python -m services.buffer.main`)."""

    database_url: DatabaseUrl
    """URL of Postgres, `postgresql://user:password@host:port/database`. Special characters of user
    and password are percent-encoded (@ is %40, / is %2F). What follows a question mark are
    parameters of libpq, and `prepare_threshold`: uses after which a statement is prepared, `none`
    unless given, as poolers need it."""
    token: Token
    """Bearer token that is accepted with scope `admin`, of at least 20 characters."""
    root_path: RootPath | None = None
    """Path below which a proxy leads to the service, such as `/team/bapo`, if the proxy leaves it
    in requests, as an Ingress does. The service also answers requests without it."""
    replica_token: Token | None = None
    """Bearer token that is accepted with scope `replica`; none unless set, as the next three."""
    collector_token: Token | None = None
    """Bearer token that is accepted with scope `collector`."""
    trainer_token: Token | None = None
    """Bearer token that is accepted with scope `trainer`."""
    pipeline_token: Token | None = None
    """Bearer token that is accepted with scope `pipeline`."""

    @model_validator(mode="after")
    def _require_different_tokens(self) -> Self:
        tokens = self.tokens()
        if len(set(tokens.values())) < len(tokens):
            raise ValueError(
                "two of BAPO_TOKEN, BAPO_REPLICA_TOKEN, BAPO_COLLECTOR_TOKEN, BAPO_TRAINER_TOKEN "
                "and BAPO_PIPELINE_TOKEN are the same; each scope needs a token of its own"
            )
        return self

    def tokens(self) -> dict[Scope, str]:
        """Returns the token of each scope that has one."""
        tokens: dict[Scope, Token | None] = {
            "admin": self.token,
            "replica": self.replica_token,
            "collector": self.collector_token,
            "trainer": self.trainer_token,
            "pipeline": self.pipeline_token,
        }
        return {scope: token.get_secret_value() for scope, token in tokens.items() if token}


class MigrationSettings(Settings):
    """Settings of the migration (`python -m services.buffer.migrate`)."""

    database_url: DatabaseUrl
    """URL of Postgres, `postgresql://user:password@host:port/database`. Special characters of user
    and password are percent-encoded (@ is %40, / is %2F). What follows a question mark are
    parameters of libpq, and `prepare_threshold`: uses after which a statement is prepared, `none`
    unless given, as poolers need it."""
    migrate_within_s: float = Field(120.0, ge=0.0)
    """Seconds to wait for a database that does not accept connections yet."""
