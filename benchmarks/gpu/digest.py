"""Tells whether the code of a part has changed since its results were measured.

A part's code is the source of the module that measures it, of the modules of this project that it
imports, directly or through others, and of the programs that it starts. Import statements alone
count, wherever they stand in a module; data files and other packages do not.

Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.gpu.parts import Part

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bapo_core", "benchmarks", "pipelines", "services", "tools")
SUITE = ("__main__", "bundle", "child", "digest", "parts", "record", "table")
"""Modules of the suite that choose, store and show measurements, and measure nothing."""


def digest_of(part: Part) -> str:
    """Returns a digest of the part's code, which changes whenever a byte of it does."""
    digest = hashlib.sha256()
    for path in source_files(part):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def source_files(part: Part) -> list[Path]:
    """Returns the files of the part's code, sorted."""
    left = [f"benchmarks.gpu.{part.name}"]
    for program in part.programs:
        left += _below(program)
    left = [name for module in left for name in _with_packages(module)]
    found: set[str] = set()
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imported_modules(module)
    suite = {f"benchmarks.gpu.{name}" for name in SUITE}
    return sorted(path for name in found - suite if (path := _path_of(name)) is not None)


@cache
def imported_modules(module: str) -> tuple[str, ...]:
    """Returns the modules of this project that the module imports, packages included."""
    path = _path_of(module)
    if path is None:
        return ()
    return tuple(sorted({name for name in _imports(ast.parse(path.read_bytes()))}))


def forget_sources() -> None:
    """Forgets what has been read, for files that have changed since."""
    imported_modules.cache_clear()
    _path_of.cache_clear()


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] in PACKAGES:
                yield from _with_packages(name)


def _with_packages(name: str) -> Iterator[str]:
    """Yields a module and the packages around it, whose `__init__` runs before it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        if _path_of(module) is not None:
            yield module


def _below(name: str) -> list[str]:
    """Returns the modules of a package, or the module that is none."""
    directory = ROOT.joinpath(*name.split("."))
    paths = sorted(directory.rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths] or [name]


@cache
def _path_of(module: str) -> Path | None:
    """Returns the file of a module, or of its package's `__init__`; None if it is neither."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
