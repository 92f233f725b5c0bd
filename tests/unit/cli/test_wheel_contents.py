"""The wheel has every file of the packages, by setuptools' own reckoning and without a build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("bapo_core", "pipelines", "services")
LEFT_OUT = {"pipelines/bapo_pipeline.yaml"}
"""Compiled from the code; an installed `bapo pipeline compile` writes it anywhere."""
PROGRAM = """
import sys
from setuptools import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
distribution.get_command_obj("egg_info").egg_base = sys.argv[1]
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
command.build_lib = ""
print(*command.get_outputs(include_bytecode=False), sep="\\n")
"""


def test_every_file_of_the_packages_is_in_the_wheel(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    packed = {line for line in done.stdout.splitlines() if line.startswith(PACKAGES)}
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - packed == LEFT_OUT
