"""Routes that check who calls, and how much is sent, before a byte of a request's body is read.

FastAPI reads and parses a JSON body before it calls the dependencies of a route. A caller without a
token could so make a service hold and parse whatever it sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

Body = TypeVar("Body", bound=BaseModel)

BODY_WITHIN_S = 60.0
"""Seconds to wait for more of a body."""
LARGEST_BODY = 1 << 20
"""Largest body in bytes of a route that does not say otherwise. A parsed JSON body takes up to 28
times its size in memory."""


class Guard:
    """Admits requests to a route. It stands among the dependencies of a `GuardedRoute`."""

    def __init__(self, largest_body: int = LARGEST_BODY) -> None:
        """largest_body: size in bytes beyond which a body is refused."""
        self.largest_body = largest_body

    async def admit(self, request: Request) -> None:
        """Raises a `Problem` unless the request may go on. It must not read the body."""
        raise NotImplementedError

    def openapi(self) -> dict[str, Any]:
        """Returns what the OpenAPI document says of the guard at its route."""
        return {}

    async def __call__(self) -> None:
        """Does nothing when FastAPI calls it: `GuardedRoute` has admitted the request by then."""


class GuardedRoute(APIRoute):
    """A route of which the last `Guard` among its dependencies admits each request."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        self.openapi_extra = {**(self.openapi_extra or {}), **self.guard.openapi()}

    @property
    def guard(self) -> Guard:
        """The guard of the route. Raises `TypeError` if the route has none."""
        found = [each.dependency for each in self.dependencies]
        guards = [dependency for dependency in found if isinstance(dependency, Guard)]
        if not guards:
            raise TypeError(f"the route {self.path} has no guard; say who may call it")
        return guards[-1]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        guard, handle = self.guard, super().get_route_handler()

        async def admit_and_handle(request: Request) -> Response:
            await guard.admit(request)
            declared = request.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > guard.largest_body:
                raise _too_large(guard.largest_body)
            limited = _limit_body(request.receive, guard.largest_body)
            return await handle(Request(request.scope, limited))

        return admit_and_handle


def _limit_body(receive: Receive, largest: int) -> Receive:
    """Returns a `receive` that raises a 413 after more than `largest` bytes, and a 408 if no more
    of them arrive."""
    size, complete = 0, False

    async def limited() -> Message:
        nonlocal size, complete
        try:
            async with asyncio.timeout(None if complete else BODY_WITHIN_S):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, f"no data for {BODY_WITHIN_S:.0f} s; send it again") from error
        size += len(message.get("body", b""))
        # The next message tells that the client has gone, whenever that is.
        complete = not message.get("more_body", False)
        if size > largest:
            raise _too_large(largest)
        return message

    return limited


def _too_large(largest: int) -> HTTPException:
    """Returns a 413. FastAPI passes on no other exception from the reading of a body."""
    return HTTPException(413, f"the body is larger than {largest} bytes; send it in smaller parts")


async def parse_body(request: Request, model: type[Body]) -> Body:
    """Parses a large JSON body in a thread, so that the event loop answers others meanwhile.

    Raises `RequestValidationError`, as FastAPI does for a body that it parses itself.
    """
    body = await request.body()
    try:
        return await run_in_threadpool(model.model_validate_json, body)
    except ValidationError as error:
        problems = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise RequestValidationError(problems) from error
