"""The packages that are compared, each in a directory of its own (`make test-parity`)."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _import(directory: str, module: str) -> Any:
    packages = ROOT / directory
    if not packages.is_dir():
        pytest.skip(f"needs {directory}: run `make test-parity`")
    # At the end, so that the packages of .venv go first. verl has a package `tests`, too.
    if str(packages) not in sys.path:
        sys.path.append(str(packages))
    return import_module(module)


@pytest.fixture(scope="session")
def verl() -> Any:
    """verl's losses, estimators and KL estimators."""
    return _import(".verl", "verl.trainer.ppo.core_algos")


@pytest.fixture(scope="session")
def correction() -> Any:
    """verl's rollout correction."""
    return _import(".verl", "verl.trainer.ppo.rollout_corr_helper")


@pytest.fixture(scope="session")
def trl() -> Any:
    """TRL."""
    return _import(".trl", "trl")
