"""Stores and serves images of prompts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from services.buffer.api import wire
from services.buffer.runs.tokens import permit
from services.buffer.service import ServiceDep
from services.buffer.storage import images
from services.common.guard import GuardedRoute
from services.common.images import MEDIA_TYPES

LARGEST_UPLOAD = 16 << 20
"""Largest body in bytes, more than an image may have: its own limit is explained better."""
READ, STORE = permit("read"), permit("run", "pipeline", largest_body=LARGEST_UPLOAD)

IMAGE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
IMAGE_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file",
        "content": {
            media_type: {"schema": {"type": "string", "format": "binary"}}
            for media_type in MEDIA_TYPES.values()
        },
    }
}
HEADERS = {
    # The address contains the digest of the content, which therefore never changes.
    "Cache-Control": "private, max-age=31536000, immutable",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}

ImageDigest = Annotated[
    str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the image's file")
]

router = APIRouter(route_class=GuardedRoute, prefix="/v1/images", tags=["images"])


@router.post("/missing", dependencies=READ)
def missing_images(service: ServiceDep, body: wire.ImageDigests) -> wire.ImageDigests:
    """Returns those of the digests under which no image is stored."""
    return wire.ImageDigests(digests=images.missing_images(service.store, body.digests))


@router.put("/{digest}", dependencies=STORE, openapi_extra=IMAGE_BODY)
async def store_image(service: ServiceDep, request: Request, digest: ImageDigest) -> None:
    """Stores an image: a PNG, JPEG or WebP file of at most 10 MiB and 25 million pixels.

    Storing it again changes nothing.
    """
    body = await request.body()
    await run_in_threadpool(images.store_image, service.store, digest, body)


@router.get(
    "/{digest}",
    dependencies=permit("read", of_no_run=True),
    responses=IMAGE_ANSWER,
    response_class=Response,
)
def get_image(service: ServiceDep, digest: ImageDigest) -> Response:
    """Returns the file of an image."""
    data, media_type = images.read_image(service.store, digest)
    return Response(data, media_type=media_type, headers=HEADERS)
