"""The pages that are generated from the commands and from the settings classes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.generate import commands, environment
from services.common.settings import variables

ROOT = Path(__file__).parents[3]
VARIABLE = re.compile(r"BAPO_[A-Z0-9]+(_[A-Z0-9]+)*")


def test_the_command_reference_is_current() -> None:
    assert (ROOT / "docs/cli.md").read_text() == commands.render(), "run `make docs`"


def test_the_page_of_environment_variables_is_current() -> None:
    assert (ROOT / "docs/environment.md").read_text() == environment.render(), "run `make docs`"


def test_every_module_with_settings_is_on_the_page() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("services", "pipelines")
        for path in (ROOT / package).rglob("settings.py")
    }
    assert modules - {"services.common.settings"} == set(environment.MODULES)


def test_every_variable_is_explained() -> None:
    for settings in environment.settings_classes():
        for name, field in variables(settings):
            assert (field.description or "").endswith("."), f"{settings.__name__}: {name}"


def test_no_variable_that_the_code_names_is_missing() -> None:
    documented = set(re.findall(r"^\| `(BAPO_\w+)`", environment.render(), re.MULTILINE))
    for package in ("services", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            named = {
                node.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and VARIABLE.fullmatch(node.value)
            }
            assert named <= documented, path
