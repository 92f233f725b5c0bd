"""Environment variables of the command line."""

from __future__ import annotations

from pydantic import SecretStr

from services.common.settings import Settings


class CommandLineSettings(Settings):
    """Settings of the command line.

    They name the services to ask, where these are not the stack of this machine.
    """

    buffer_url: str | None = None
    """Address of the buffer service to ask, `http://host:port`; takes effect with `BAPO_TOKEN`.
    The stack in `BAPO_HOME` is asked unless set."""
    token: SecretStr | None = None
    """Bearer token for the buffer service at `BAPO_BUFFER_URL`."""
    s3_endpoint: str | None = None
    """Address of that service's object store, for `bapo checkpoints`, `bapo profile` and
    `bapo verify`; it requires `BAPO_S3_BUCKET`, `BAPO_S3_ACCESS_KEY` and `BAPO_S3_SECRET_KEY`."""
