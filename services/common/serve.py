"""Serving an app on the host and port of the environment."""

from __future__ import annotations

import os

import uvicorn
from fastapi import FastAPI

from services.common.settings import require


def serve(app: FastAPI) -> None:
    """Serves until terminated; requests under way are finished."""
    uvicorn.run(
        app,
        host=os.environ.get("BAPO_HOST", "127.0.0.1"),
        port=int(require("BAPO_PORT")),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
    )
