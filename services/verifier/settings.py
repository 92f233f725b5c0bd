"""Settings (environment variables) of the verifier."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ConfigDict, Field

from services.common.settings import ServerSettings, SettingsGroup, Token


class VerifierSettings(SettingsGroup):
    """Size and limits of the verifier's pool of processes."""

    model_config = ConfigDict(allow_inf_nan=False)

    workers: int = Field(default_factory=lambda: max(1, (os.cpu_count() or 2) // 2), ge=1)
    """Processes that score responses; half of the cores unless set."""
    deadline_s: float = Field(5.0, ge=0.1)
    """Seconds that scoring one response may take."""
    # SymPy alone needs more than a few MiB for an ordinary answer.
    memory_mb: int = Field(1024, ge=64)
    """MiB of memory that scoring one response may take."""
    queue: int = Field(65_536, ge=1)
    """Responses in progress or waiting; beyond this number, requests are answered with 429."""
    read: str = ""
    """Files and directories that tasks may read besides their packages, separated by colons."""


class VerifierServerSettings(ServerSettings):
    """Settings of the verifier (`python -m services.verifier.app`)."""

    token: Token
    """Bearer token that every request must carry, of at least 20 characters."""
    verifier: VerifierSettings = VerifierSettings()
    """Size and limits of the pool of processes."""
    home: Path = Path(".bapo")
    """Directory of the local stack, which tasks may not read."""
