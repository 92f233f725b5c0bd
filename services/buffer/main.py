"""`python -m services.buffer.main`: serves the buffer service."""

from __future__ import annotations

import socket

from fastapi import FastAPI

from services.buffer.app import create_app
from services.buffer.service import Service
from services.buffer.settings import BufferSettings
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.process import hide_memory, run_until_error
from services.common.serve import Server, serve


def main() -> None:
    """Serves until the process is terminated; settings come from the environment."""
    configure_logs("buffer")
    hide_memory()

    def work() -> None:
        settings = BufferSettings.load()
        app = create_app(
            settings.database_url.get_secret_value(),
            # Few retries: clients repeat calls, and a request must not occupy a thread for long.
            ObjectStore(settings.s3, retries=4),
            settings.tokens(),
            settings.root_path,
        )
        serve(app, settings, _Server)

    run_until_error(work)


class _Server(Server):
    """Answers the requests that wait for a change before it stops, instead of waiting for them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, FastAPI)
        service: Service = app.state.service
        service.end_waits()
        await super().shutdown(sockets)


if __name__ == "__main__":
    main()
