"""Lets containers and pods reach the tests' Postgres and S3."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

BUFFER_BYTES = 1 << 20


class Forwarder:
    """Forwards connections on a port of every interface to a port or a Unix socket of this machine.

    The tests' Postgres has no port, and its socket lets only its own user in; the tests' S3 server
    listens on loopback.
    """

    def __init__(self, target: int | str) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self.port = 0

    def __enter__(self) -> Forwarder:
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "0.0.0.0", 0), self._loop
        ).result()
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._target, str):
            upstream, downstream = await asyncio.open_unix_connection(self._target)
        else:
            upstream, downstream = await asyncio.open_connection(
                "127.0.0.1", self._target, limit=BUFFER_BYTES
            )
        # Python 3.11 logs a traceback for each connection whose task ends as cancelled.
        with suppress(asyncio.CancelledError):
            await asyncio.gather(_copy(reader, downstream), _copy(upstream, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(BUFFER_BYTES):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the other end is gone
    finally:
        writer.close()
