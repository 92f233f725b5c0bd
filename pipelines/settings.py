"""Environment variables of the pipeline's steps."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic import Field

from services.common.settings import (
    BufferClientSettings,
    ObjectStoreClientSettings,
    Settings,
)


class StepSettings(BufferClientSettings, ObjectStoreClientSettings):
    """Settings of a step of the pipeline, from the connection ConfigMap and the Secrets."""

    workflow: str = ""
    """Name of the Argo workflow that the step belongs to."""
    scratch: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Directory for models in transfer."""


class LocalJobsSettings(Settings):
    """Settings of a pipeline that runs without a cluster (`bapo pipeline run-local`)."""

    local_jobs: Path | None = None
    """Directory of the trainer's jobs, which are processes of this machine; unset in a cluster."""
