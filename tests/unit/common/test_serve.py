"""How every service is served."""

from __future__ import annotations

from fastapi import FastAPI

from services.common.serve import server_config
from services.common.settings import ServerSettings

CLOSED_AFTER_S = {"nginx": 60, "AWS": 60, "Google Cloud": 600}
"""Seconds after which load balancers close idle connections to a server, by default."""


def test_idle_connections_stay_open_longer_than_load_balancers_keep_theirs() -> None:
    """A server that closes first does so while a request is on its way, which becomes a 502."""
    config = server_config(FastAPI(), ServerSettings(port=8700))
    assert config.timeout_keep_alive > max(CLOSED_AFTER_S.values())
