"""Modules of bapo_core import without the libraries that only some processes have installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "types", "config", "filters", "thresholds", "buffers", "batch", "schedule", "theory",
    "metrics", "seeding", "tasks",
]  # fmt: skip


@pytest.mark.parametrize("blocked", ["torch", "pyarrow"])
def test_modules_without_tensors_import_without_heavy_libraries(blocked: str) -> None:
    modules = ", ".join(f"bapo_core.{name}" for name in WITHOUT_TORCH)
    code = f"import sys; sys.modules[{blocked!r}] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
