"""Versions of the weights on this machine's disk."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from services.buffer.api.wire import StoredVersion
from services.common.objectstore import ObjectStore


class WeightCache:
    """Fetches published versions, checks every digest, and keeps those that may be wanted.

    A version is a directory named after its number and manifest, because a run that was rewound
    may publish the same number again. A fetch that was interrupted goes on where it ended.
    """

    def __init__(self, store: ObjectStore, directory: Path) -> None:
        self._store, self._directory = store, directory
        self._whole: set[Path] = set()
        """Checked by this process: what lies there from before it may be torn."""
        directory.mkdir(parents=True, exist_ok=True)

    def fetch(self, stored: StoredVersion) -> Path:
        """The directory of a version. Raises `ObjectStoreError`."""
        directory = self._place(stored)
        if directory not in self._whole:
            self._store.get_directory(stored.uri, stored.manifest_digest, directory)
            self._whole.add(directory)
        return directory

    def holds(self, stored: StoredVersion) -> bool:
        """Whether the version is here, whole."""
        return self._place(stored) in self._whole

    def prune(self, keep: Collection[StoredVersion]) -> None:
        """Deletes every version but these."""
        kept = {self._place(stored) for stored in keep}
        for directory in self._directory.glob("v*-*"):
            if directory not in kept:
                self._whole.discard(directory)
                shutil.rmtree(directory)

    def _place(self, stored: StoredVersion) -> Path:
        return self._directory / f"v{stored.number}-{stored.manifest_digest[:16]}"
