"""Serves an ASGI application."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from services.common.settings import ServerSettings


def serve(app: FastAPI, settings: ServerSettings) -> None:
    """Serves `app` until the process is terminated; open requests get 5 seconds to finish."""
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
    )
