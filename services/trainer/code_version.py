"""The version of the code that computes a step, which each step's digest names."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import bapo_core
import services.trainer


@lru_cache(maxsize=1)
def code_version() -> str:
    """Returns the version of bapo, and a digest of the sources that compute a step."""
    digest = hashlib.sha256()
    for package in (bapo_core, services.trainer):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return f"{services.VERSION}+{digest.hexdigest()[:16]}"
