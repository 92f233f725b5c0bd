"""Stores images of prompts once, by the digests of their files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import ColumnElement, literal_column

from services.common import layout
from services.common.images import LARGEST_IMAGE, check_image
from services.common.objectstore import ObjectStore, digest_of
from services.common.problems import bad_request, not_found

CONCURRENT_CHECKS = 16
IMAGE_DIGESTS: ColumnElement[str] = literal_column("'$.images[*].digest'")
"""The path of the digests of images in a payload, for the functions of jsonb."""


def missing_images(store: ObjectStore, digests: Sequence[str]) -> list[str]:
    """Returns those digests under which no image is stored, each once, in their order."""
    distinct = list(dict.fromkeys(digests))
    with ThreadPoolExecutor(CONCURRENT_CHECKS) as pool:
        stored = pool.map(lambda digest: store.exists(layout.image(digest)), distinct)
        return [digest for digest, is_stored in zip(distinct, stored, strict=True) if not is_stored]


def store_image(store: ObjectStore, digest: str, data: bytes) -> None:
    """Stores an image. Raises 400 for another digest, and for a file that is no valid image."""
    if digest_of(data) != digest:
        raise bad_request(f"the body has the digest {digest_of(data)}, not {digest}; send it whole")
    try:
        check_image(data)
    except ValueError as error:
        raise bad_request(f"image {digest[:12]}: {error}") from error
    store.put(layout.image(digest), data)


def read_image(store: ObjectStore, digest: str) -> tuple[bytes, str]:
    """Returns the bytes and the media type of an image. Raises 404 if there is none."""
    key = layout.image(digest)
    if not store.exists(key):
        raise not_found(f"image {digest}")
    data = store.get(key, digest, largest=LARGEST_IMAGE)
    return data, check_image(data).media_type
