"""A server of somebody else, which records what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class ForeignServer:
    """The address of a server that answers 404, and the requests that it has received."""

    url: str
    paths: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


@contextmanager
def foreign_server() -> Iterator[ForeignServer]:
    """Serves GET and POST on loopback until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.paths.append(self.path)
            served.headers.append(str(self.headers))
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = ForeignServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
