"""ASGI middleware: checks the host of requests, serves below a path, adds headers to responses."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.problems import problem_response
from services.common.proxies import is_address


class KnownHosts:
    """Answers 421 to requests for a name that is not the server's.

    A page of another host could otherwise have its own name resolved to this server's address, and
    read what needs no token, as the page's own origin (DNS rebinding). IP addresses and names
    without a full stop, such as `localhost`, cannot be rebound.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """names: names of the server; one that begins with a full stop stands for all that end
        with it."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _host_of(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
            if not self._is_own(host):
                response = problem_response(
                    421,
                    "Misdirected request",
                    f"this server does not know the host name {host[:100]!r}; if it is one of its "
                    "names, add it to BAPO_HOST_NAMES",
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        if "." not in host or is_address(host):
            return True
        return any(
            host.endswith(name) if name.startswith(".") else host == name for name in self._names
        )


def _host_of(header: str) -> str:
    """Returns the host of a `Host` header, without its port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().rstrip(".")


class RootPath:
    """Serves an app below a path as well, such as `/team/bapo`, for proxies that do not remove it.

    An Ingress of Kubernetes sends the whole path to the service. Processes in the cluster call the
    service without one, so both are served.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """root_path: begins with a slash and does not end with one."""
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == self._root_path:
                path += "/"
            elif not path.startswith(f"{self._root_path}/"):
                # `path` includes `root_path`, says ASGI.
                path = self._root_path + path
            scope = {**scope, "root_path": self._root_path, "path": path}
        await self._app(scope, receive, send)


class PrivateAnswers:
    """Has browsers neither store answers nor guess another type of content than the stated one.

    A route may state both headers itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_private(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                stated = {name for name, _ in headers}
                headers += [pair for pair in PRIVATE if pair[0] not in stated]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_private)


PRIVATE = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class EntityTags:
    """Adds an ETag to every JSON response to a GET; answers 304 if the client has the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        client_tags = dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1")
        await self._app(scope, receive, _Tagging(send, client_tags))


class _Tagging:
    """Buffers a JSON response until its tag is known; passes other responses on as they come."""

    def __init__(self, send: Send, client_tags: str) -> None:
        self._send, self._client_tags = send, client_tags
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_json(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        headers = [*start["headers"], (b"etag", tag.encode())]
        if tag in (value.strip().removeprefix("W/") for value in self._client_tags.split(",")):
            headers = [pair for pair in headers if not pair[0].startswith(b"content-")]
            await self._send({**start, "status": 304, "headers": headers})
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await self._send({**start, "headers": headers})
            await self._send({"type": "http.response.body", "body": bytes(self._body)})


def _is_json(message: Message) -> bool:
    kind: bytes = dict(message["headers"]).get(b"content-type", b"")
    return message["status"] == 200 and kind.startswith(b"application/json")
