"""Checks images of rows, keeps them until they are stored, and replaces them by references."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_core.tasks import ImageTask, Payload, Task
from services.buffer.api import wire
from services.common.images import LARGEST_IMAGE, ImageReference, check_image


class Images:
    """Images of a data set by digest, in a temporary directory or in the buffer service."""

    def __init__(self, fetch: Callable[[str], bytes], directory: Path | None = None) -> None:
        """fetch: returns an image that is stored already.

        directory: directory below which rows may name the files of their images; None if they must
        contain them. Whoever made the rows must not get other files of this machine into the data
        set, from which they would be uploaded.
        """
        self._fetch, self._directory = fetch, directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._references: dict[str, ImageReference] = {}

    @property
    def digests(self) -> Sequence[str]:
        """The digests of the images that were taken from rows."""
        return list(self._references)

    def get(self, digest: str) -> bytes:
        """Returns the bytes of an image. Raises what `fetch` raises."""
        if self._temporary is not None and digest in self._references:
            return (Path(self._temporary.name) / digest).read_bytes()
        return self._fetch(digest)

    def take_row(self, task: Task, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a row, or a generated payload, with references in place of its images.

        Raises `ValueError`, which names column and image, for an image that cannot be taken.
        """
        columns = task.image_columns if isinstance(task, ImageTask) else ()
        return {
            name: self._take_value(value, name) if name in columns else value
            for name, value in row.items()
        }

    def _take_value(self, value: Any, name: str) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [self._take(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return self._take(value, name)

    def _take(self, value: Any, name: str) -> ImageReference:
        source = name
        try:
            if isinstance(value, dict):
                data, path = value.get("bytes"), value.get("path")
                source = f"{name} ({path})" if path else name
                value = path if data is None else data
            if isinstance(value, str):
                source = f"{name} ({value})"
                value = self._read_file(value)
            if not isinstance(value, bytes):
                raise ValueError(
                    f"is {value!r:.40}; make it an image struct {{bytes, path}}, or the path of a "
                    "file"
                )
            return self._keep(value)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def _read_file(self, path: str) -> bytes:
        if self._directory is None:
            raise ValueError("is a path, which only rows of a local file may have; embed the image")
        file, root = (Path(os.path.realpath(p)) for p in (self._directory / path, self._directory))
        if not file.is_relative_to(root):
            raise ValueError(
                f"is outside of the data set's directory {root}; copy the image into it, and give "
                "its path relative to the data set"
            )
        try:
            # A named pipe that is opened to wait would wait for ever, and a device has no end.
            with open(file, "rb", opener=_open_without_waiting) as opened:
                if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                    raise ValueError("is no regular file; give the path of an image")
                data = opened.read(LARGEST_IMAGE + 1)
        except OSError as error:
            raise ValueError(f"{error.strerror}; give a path relative to the data set") from error
        if len(data) > LARGEST_IMAGE:
            raise ValueError(f"the image has more than {LARGEST_IMAGE} bytes; reduce its size")
        return data

    def _keep(self, data: bytes) -> ImageReference:
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._references:
            facts = check_image(data)
            if self._temporary is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="bapo-images-")
            (Path(self._temporary.name) / digest).write_bytes(data)
            self._references[digest] = ImageReference(
                digest=digest, width=facts.width, height=facts.height
            )
        return self._references[digest]


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def image_digests(payload: Payload) -> list[str]:
    """Returns the digests of a prompt's images, in their order."""
    images = payload.get("images")
    if not isinstance(images, list):
        return []
    return [image["digest"] for image in images if isinstance(image, dict) and "digest" in image]


def digests_of_prompts(prompts: Sequence[wire.PromptItem]) -> list[str]:
    """Returns the digests of all images of prompts, each once."""
    digests = (digest for prompt in prompts for digest in image_digests(prompt.payload))
    return list(dict.fromkeys(digests))
