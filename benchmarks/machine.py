"""Describes the machine that a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def machine(*packages: str) -> dict[str, object]:
    """Returns processor, cores, load, Python, and the versions of `packages`."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
