"""Serves an ASGI application."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from services.common.settings import ServerSettings

STARTUP_FAILED = 3
"""Exit code of a server whose app did not start, as of the `uvicorn` command."""


def serve(
    app: FastAPI, settings: ServerSettings, server_class: type[uvicorn.Server] = uvicorn.Server
) -> None:
    """Serves `app` until the process is terminated; open requests get 5 seconds to finish."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = server_class(config)
    inherited = settings.listen_fd
    sockets = None if inherited is None else [socket.socket(fileno=inherited)]
    with suppress(KeyboardInterrupt):
        server.run(sockets)
    if not server.started:
        sys.exit(STARTUP_FAILED)
