"""Environment variables of the command line."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from services.common.settings import Address, Endpoint, Secret, Settings


class CommandLineSettings(Settings):
    """Settings of the command line.

    They name the services to ask, where these are not the stack of this machine.
    """

    buffer_url: Address | None = None
    """Address of the buffer service to ask, `http://host:port`; it requires `BAPO_TOKEN`. The stack
    in `BAPO_HOME` is asked unless set."""
    token: Secret | None = None
    """Bearer token for the buffer service at `BAPO_BUFFER_URL`."""
    s3_endpoint: Endpoint | None = None
    """Address of that service's object store, for `bapo checkpoints`, `bapo profile` and
    `bapo audit`; it requires `BAPO_S3_BUCKET`, `BAPO_S3_ACCESS_KEY` and `BAPO_S3_SECRET_KEY`."""

    @model_validator(mode="after")
    def _require_both(self) -> Self:
        given, missing = "BAPO_BUFFER_URL", "BAPO_TOKEN"
        if self.buffer_url is None:
            given, missing = missing, given
        if (self.buffer_url is None) != (self.token is None):
            raise ValueError(
                f"{missing} is not set, but {given} is; set both, or neither to ask the stack of "
                "this machine"
            )
        return self
