"""Where things are and the secrets to reach them, from the environment.

| variable | meaning |
| --- | --- |
| `BAPO_DATABASE_URL` | SQLAlchemy URL of Postgres (`postgresql+psycopg://...`) |
| `BAPO_S3_ENDPOINT` | `http://host:port` of the object store |
| `BAPO_S3_BUCKET` | bucket, created when missing |
| `BAPO_S3_ACCESS_KEY`, `BAPO_S3_SECRET_KEY` | its credentials |
| `BAPO_BUFFER_URL`, `BAPO_VERIFIER_URL` | the services |
| `BAPO_TOKEN` | bearer token for all of them |
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from services.common.errors import BapoError


def require(name: str) -> str:
    """The environment variable `name`, or an error that names it."""
    value = os.environ.get(name, "")
    if not value:
        raise BapoError(
            f"the environment variable {name} is not set; `bapo run` sets it, and "
            "services/common/settings.py lists them all"
        )
    return value


@dataclass(frozen=True, slots=True)
class ObjectStoreSettings:
    endpoint: str
    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    @classmethod
    def from_environment(cls) -> ObjectStoreSettings:
        return cls(
            endpoint=require("BAPO_S3_ENDPOINT"),
            bucket=require("BAPO_S3_BUCKET"),
            access_key=require("BAPO_S3_ACCESS_KEY"),
            secret_key=require("BAPO_S3_SECRET_KEY"),
        )

    def environment(self) -> dict[str, str]:
        return {
            "BAPO_S3_ENDPOINT": self.endpoint,
            "BAPO_S3_BUCKET": self.bucket,
            "BAPO_S3_ACCESS_KEY": self.access_key,
            "BAPO_S3_SECRET_KEY": self.secret_key,
        }
