"""Checks, decodes and caches images of prompts."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from services.common import layout
from services.common.errors import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

    from services.common.objectstore import ObjectStore

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
"""Media types of the accepted formats, by Pillow's names of them."""
LARGEST_IMAGE = 10 << 20
"""Maximum bytes of an image file."""
MOST_PIXELS = 25_000_000
"""Maximum pixels of an image: a small file may decode to gigabytes."""
LONGEST_SIDES = 200
"""Maximum ratio of the longer to the shorter side: the image processors refuse longer ones."""
CACHED_BYTES = 256 << 20


class ImageReference(TypedDict):
    """An image, as payloads refer to it."""

    digest: str
    """SHA-256 of the file, 64 hexadecimal digits."""
    width: int
    """Pixels, as the image is shown."""
    height: int
    """Pixels, as the image is shown."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The size and the media type of an image, as its file states them."""

    width: int
    height: int
    media_type: str


def check_image(data: bytes) -> ImageFacts:
    """Decodes an image file and returns its facts.

    Raises `ValueError` for a file that is too large or too narrow, that has another format than
    PNG, JPEG or WebP, or that cannot be decoded.
    """
    image, media_type = _decode(data)
    if max(image.size) > LONGEST_SIDES * min(image.size):
        raise ValueError(
            f"the image has {image.width} x {image.height} pixels, of which one side is more than "
            f"{LONGEST_SIDES} times the other; crop it"
        )
    return ImageFacts(image.width, image.height, media_type)


def decode_image(data: bytes) -> Image:
    """Returns the image of a file in RGB, turned as it is shown, and on white if transparent.

    Raises `ValueError` as `check_image` does.
    """
    from PIL import Image

    image, _ = _decode(data)
    if image.has_transparency_data:
        opaque = image.convert("RGBA")
        image = Image.new("RGBA", opaque.size, "white")
        image.alpha_composite(opaque)
    return image.convert("RGB")


def _decode(data: bytes) -> tuple[Image, str]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > LARGEST_IMAGE:
        raise ValueError(
            f"the image has {len(data)} bytes, more than {LARGEST_IMAGE}; reduce its size"
        )
    try:
        image = Image.open(io.BytesIO(data), formats=list(MEDIA_TYPES))
    except UnidentifiedImageError as error:
        raise ValueError("is no image in PNG, JPEG or WebP; convert it to one of these") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _undecodable(error) from error
    media_type = MEDIA_TYPES[str(image.format)]
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(
            f"the image has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,} "
            "together; reduce its size"
        )
    try:
        image.load()
        return ImageOps.exif_transpose(image), media_type
    except (OSError, SyntaxError, ValueError) as error:
        raise _undecodable(error) from error


def _undecodable(error: Exception) -> ValueError:
    reason = first_line(error)
    return ValueError(f"the image cannot be decoded ({reason}); replace it or remove the row")


class ImageCache:
    """Fetches images by digest, and keeps the bytes of those used last. Threads may share it."""

    def __init__(self, fetch: Callable[[str], bytes], capacity: int = CACHED_BYTES) -> None:
        """fetch: returns the bytes of a digest. capacity: most bytes that are kept."""
        self._fetch, self._capacity = fetch, capacity
        self._images: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, digest: str) -> bytes:
        """Returns the bytes of an image. Raises what `fetch` raises."""
        with self._lock:
            if digest in self._images:
                self._images.move_to_end(digest)
                return self._images[digest]
        data = self._fetch(digest)
        with self._lock:
            if digest not in self._images:
                self._images[digest] = data
                self._size += len(data)
            while self._size > self._capacity and len(self._images) > 1:
                _, dropped = self._images.popitem(last=False)
                self._size -= len(dropped)
        return data


def stored_images(store: ObjectStore) -> ImageCache:
    """Returns a cache of the images of the object store."""
    return ImageCache(lambda digest: store.get(layout.image(digest), digest, largest=LARGEST_IMAGE))
