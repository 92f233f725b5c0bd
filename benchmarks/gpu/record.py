"""The result file of a part: written after every measurement, so that a cut-off part still counts.

A new run keeps every result of the file until it has measured this result again, so figures of
several runs accumulate. Each result therefore has an origin: device, commit, and digest of the code
that it was measured with.

Imports nothing but the standard library until a measurement runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Size = Literal["full", "toy"]
Status = Literal["running", "done", "failed", "timed out", "not run", "unchanged"]
Origin = dict[str, str]
"""Where a result is from: `device`, `commit`, and `started`, when the run started that measured it;
besides, `packages` (versions) and `digest` (of the part's code), which older results lack."""
PACKAGES = (
    *("torch", "triton", "transformers", "peft", "accelerate", "trl", "liger-kernel", "vllm"),
    "flash-attn-4",
)


class CasesFailed(Exception):
    """Some cases of a part failed; their errors are in the part's record."""


@dataclass
class Record:
    """State and results of one part."""

    path: Path
    """The JSON file."""
    part: str
    size: Size = "full"
    """`toy` runs the same code in seconds on a CPU; its figures mean nothing."""
    commit: str = "unknown"
    """Commit of the last run; the results that an earlier run measured have their own."""
    status: Status = "running"
    """State of the last run, which may have measured a few cases alone."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Traceback of a part that failed, or the end of its output."""
    note: str = ""
    """Remark on how the results came about, written by hand."""
    failures: dict[str, str] = field(default_factory=dict)
    """Tracebacks of the cases that failed, by case, until they succeed."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """Origins of the results. A result without one is from the file's own commit and device."""
    complete: dict[str, Origin] = field(default_factory=dict)
    """Origins of the cases that were measured to their end; the part's name stands for the whole
    part where it has no cases."""
    digest: str = ""
    """Digest of the part's code, see `digest_of`."""
    cases: tuple[str, ...] = ()
    """Cases that this run measures; all if there are none."""

    _TRANSIENT = ("path", "digest", "cases")

    def __post_init__(self) -> None:
        self._measured: set[str] = set()
        self._begun: float | None = None

    @property
    def toy(self) -> bool:
        return self.size == "toy"

    @property
    def new_results(self) -> dict[str, Any]:
        """The results that this run has measured."""
        return {name: value for name, value in self.results.items() if name in self._measured}

    @classmethod
    def read(cls, path: Path) -> Record:
        """Reads what another process wrote."""
        return cls(path=path, **json.loads(path.read_text()))

    @classmethod
    def after(
        cls,
        path: Path,
        part: str,
        size: Size = "full",
        commit: str = "unknown",
        digest: str = "",
        cases: Sequence[str] = (),
    ) -> Record:
        """Returns the record of a new run, with the results that the file has already.

        Raises `ValueError` if the file has results of another size.
        """
        record = cls(path, part, size, commit, digest=digest, cases=tuple(cases))
        if path.exists():
            earlier = cls.read(path)
            if earlier.size != size:
                raise ValueError(
                    f"{path} has results of the size {earlier.size!r}, which results of the size "
                    f"{size!r} would replace; name another directory with --out"
                )
            record.results, record.failures = earlier.results, earlier.failures
            record.origins = {name: earlier.origin_of(name) for name in earlier.results}
            record.complete, record.versions = earlier.complete, earlier.versions
            record.device, record.note = earlier.device, earlier.note
        return record

    def start(self, device: str) -> None:
        """Notes device and versions, and writes the file for the first time."""
        self.device, self.versions = device, versions()
        self._begun = time.monotonic()
        self.write()

    def origin_of(self, result: str) -> Origin:
        """Returns where a result of the file is from."""
        own = {"device": self.device, "commit": self.commit, "started": self.started}
        return self.origins.get(result, own)

    def _origin(self) -> Origin:
        return {
            "device": self.device,
            "commit": self.commit,
            "started": self.started,
            "packages": as_text(self.versions),
            "digest": self.digest,
        }

    def is_current(self, case: str, device: str, packages: str, digest: str) -> bool:
        """Returns whether the case was measured to its end on this device with this code."""
        current = {"device": device, "packages": packages, "digest": digest}
        origin = self.complete.get(case, {})
        return {name: origin.get(name) for name in current} == current

    def add(self, name: str, result: Any) -> None:
        """Adds a result or replaces an earlier run's, prints it, and writes the file."""
        self.results[name] = result
        self.origins[name] = self._origin()
        self._measured.add(name)
        self.write()
        print(f"{self.part}: {name}: {_brief(result)}", flush=True)

    def measure(self, cases: Mapping[str, Callable[[], Any]]) -> None:
        """Measures those of the cases that this run is for, and adds their results.

        A case that fails is noted, and the next one runs. Raises `CasesFailed` at the end if one
        did, and `ValueError` for a case that the part does not have.
        """
        if unknown := set(self.cases) - set(cases):
            raise ValueError(f"{self.part} has no {sorted(unknown)}; it has {sorted(cases)}")
        failed = []
        for name in [name for name in cases if not self.cases or name in self.cases]:
            try:
                result = cases[name]()
            except Exception as error:  # noqa: BLE001 - the other cases are worth the machine's time
                # The traceback as text: the frames would keep the case's tensors.
                self.failures[name] = traceback.format_exc()[-ERROR_CHARACTERS:]
                failed.append(f"{name} ({type(error).__name__})")
                self.write()
                print(self.failures[name], flush=True)
                continue
            self.failures.pop(name, None)
            self.add(name, result)
            self.complete[name] = self._origin()
            self.write()
        if failed:
            raise CasesFailed(f"failed: {', '.join(failed)}")

    def finish(self, status: Status, error: str | None = None) -> None:
        """Notes how the run ended. A whole part that is done has none of its old results left."""
        self.status, self.error = status, error
        if status == "done" and not self.cases:
            self.results = self.new_results
            self.origins = {name: self.origins[name] for name in self.results}
            self.complete[self.part] = self._origin()
        self.write()

    def write(self) -> None:
        """Replaces the file at once, so that a reader never sees half of it."""
        if self._begun is not None:
            self.seconds = round(time.monotonic() - self._begun, 1)
        content = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in self._TRANSIENT
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(scratch, self.path)


ERROR_CHARACTERS = 6_000
"""Characters of a traceback or a failed part's output that a result keeps."""


def versions() -> dict[str, str]:
    """Returns the versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


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
