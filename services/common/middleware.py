"""ASGI middleware: adds ETags to responses."""

from __future__ import annotations

import hashlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
