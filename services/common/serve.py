"""Serves an ASGI application."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.listener import bind_address
from services.common.middleware import KnownHosts, PrivateAnswers
from services.common.settings import ServerSettings

LARGEST_HEAD = 64 << 10
"""Largest head of a request in bytes, beyond what arrives in one piece (at most 256 KiB)."""
IDLE_WITHIN_S = 620
"""Seconds after which an idle connection is closed. A load balancer must close it first, because it
would otherwise send a request into a connection that is being closed, and answer 502: nginx and
AWS's close theirs after 60 seconds, Google's after 600."""


class Connection(HttpToolsProtocol):
    """A connection that is closed if the head of a request takes too long, or is too large.

    uvicorn waits for ever for the rest of a head, and keeps headers of any size.
    """

    head_within_s: ClassVar[float] = 30.0
    """Seconds from the beginning of a connection or a request to the end of its head."""
    _deadline: asyncio.TimerHandle | None = None
    _head_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None:
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._end_head()
        self._head_size = 0
        self._deadline = self.loop.call_later(self.head_within_s, self.transport.close)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server that raises what keeps its app from starting.

    uvicorn logs it as a traceback, followed by a line that has no reason.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        config.lifespan = "off"  # `serve` runs it
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, FastAPI)
        # A signal must end the app as well, so it is held back until the app has ended.
        with self.capture_signals():
            async with app.router.lifespan_context(app):
                await super().serve(sockets)


def server_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """Returns how `app` is served, after adding what all servers do to each request."""
    names = [name.strip().lower() for name in settings.host_names.split(",") if name.strip()]
    # A redirect would name the scheme and the path of the connection, not of the proxy before it.
    app.router.redirect_slashes = False
    app.add_middleware(PrivateAnswers)
    app.add_middleware(KnownHosts, names=names)
    return uvicorn.Config(
        app,
        http=Connection,
        # Whoever is on this machine could name any address in X-Forwarded-For.
        proxy_headers=False,
        log_config=None,
        access_log=False,
        timeout_keep_alive=IDLE_WITHIN_S,
        timeout_graceful_shutdown=5,
    )


def serve(app: FastAPI, settings: ServerSettings, server_class: type[Server] = Server) -> None:
    """Serves `app` until the process is terminated; open requests get 5 seconds to finish.

    Raises what the app raises when it starts, and `BapoError` if the address is taken.
    """
    server = server_class(server_config(app, settings))
    if settings.listen_fd is None:
        listener = bind_address(settings.host, settings.port)
    else:
        listener = socket.socket(fileno=settings.listen_fd)
    with suppress(KeyboardInterrupt):
        server.run([listener])
