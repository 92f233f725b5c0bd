"""The cache of weight versions on this machine's disk."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from services.buffer.api.wire import StoredVersion
from services.common.objectstore import ObjectStore


class WeightCache:
    """Fetches published versions, verifies every digest, and keeps those that may be needed again.

    Each version has a directory named after its number and manifest digest, because a run that was
    rewound may publish the same number again. An interrupted fetch resumes where it ended.
    """

    def __init__(self, store: ObjectStore, directory: Path) -> None:
        self._store, self._directory = store, directory
        self._verified: set[Path] = set()
        """Directories that this process has verified; what an earlier process left may be torn."""
        directory.mkdir(parents=True, exist_ok=True)

    def fetch(self, stored: StoredVersion) -> Path:
        """Returns the directory of a version, complete and verified. Raises `ObjectStoreError`."""
        directory = self._place(stored)
        if directory not in self._verified:
            self._store.get_directory(stored.uri, stored.manifest_digest, directory)
            self._verified.add(directory)
        return directory

    def holds(self, stored: StoredVersion) -> bool:
        """Whether the version is on disk, complete and verified."""
        return self._place(stored) in self._verified

    def prune(self, keep: Collection[StoredVersion]) -> None:
        """Deletes every version but those in `keep`. Must not be called during a `fetch`."""
        kept = {self._place(stored) for stored in keep}
        for directory in self._directory.glob("v[0-9]*-*"):
            if directory not in kept:
                self._verified.discard(directory)
                shutil.rmtree(directory)

    def _place(self, stored: StoredVersion) -> Path:
        return self._directory / f"v{stored.number}-{stored.manifest_digest[:16]}"
