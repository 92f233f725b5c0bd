"""The result file of a part: written after every measurement, so that a cut-off part still counts.

Imports nothing but the standard library until a measurement runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Size = Literal["full", "toy"]
Status = Literal["running", "done", "failed", "timed out", "not run"]
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "trl", "liger-kernel", "vllm")


@dataclass
class Record:
    """State and results of one part."""

    path: Path
    """The JSON file."""
    part: str
    size: Size = "full"
    """`toy` runs the same code in seconds on a CPU; its figures mean nothing."""
    commit: str = "unknown"
    status: Status = "running"
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Traceback of a part that failed, or the end of its output."""

    @property
    def toy(self) -> bool:
        return self.size == "toy"

    def start(self, device: str) -> None:
        """Notes device and versions, and writes the file for the first time."""
        self.device, self.versions = device, versions()
        self._begun = time.monotonic()
        self.write()

    def add(self, name: str, result: Any) -> None:
        """Adds a result, prints it, and writes the file."""
        self.results[name] = result
        self.write()
        print(f"{self.part}: {name}: {_brief(result)}", flush=True)

    def finish(self, status: Status, error: str | None = None) -> None:
        self.status, self.error = status, error
        self.write()

    def write(self) -> None:
        """Replaces the file at once, so that a reader never sees half of it."""
        if hasattr(self, "_begun"):
            self.seconds = round(time.monotonic() - self._begun, 1)
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(scratch, self.path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Reads what another process wrote."""
        return cls(path=path, **json.loads(path.read_text()))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns median, lowest, highest and number of the repetitions."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "repetitions": len(values),
    }


def _brief(result: Any) -> str:
    text = json.dumps(result, default=str)
    return text if len(text) < 400 else f"{text[:400]} …"
