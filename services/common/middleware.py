"""What every request passes on its way in and out: a limit on its body, an ETag on its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """413 for a body above `limit_of(path)` bytes, whether its length was announced or not."""

    def __init__(self, app: ASGIApp, limit_of: Callable[[str], int]) -> None:
        self._app, self._limit_of = app, limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit, read = self._limit_of(scope["path"]), 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(
                    413, f"the body is larger than {limit} bytes; send it in smaller parts"
                )
            return message

        await self._app(scope, limited, send)


class EntityTags:
    """An ETag on every JSON answer to a GET; 304 without a body where the client has it already."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        known = dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1")
        await self._app(scope, receive, _Tagging(send, known))


class _Tagging:
    """Holds a JSON answer back until its tag is known; lets others pass as they come."""

    def __init__(self, send: Send, known: str) -> None:
        self._send, self._known = send, known
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
        if tag in (each.strip().removeprefix("W/") for each in self._known.split(",")):
            headers = [pair for pair in headers if not pair[0].startswith(b"content-")]
            await self._send({**start, "status": 304, "headers": headers})
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await self._send({**start, "headers": headers})
            await self._send({"type": "http.response.body", "body": bytes(self._body)})


def _is_json(message: Message) -> bool:
    kind: bytes = dict(message["headers"]).get(b"content-type", b"")
    return message["status"] == 200 and kind.startswith(b"application/json")
