"""docs/parity.md names the tests that compare bapo with verl and TRL, and the compared versions.

It is read without the two packages, so that it cannot become stale between runs of
`make test-parity`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/parity.md").read_text(encoding="utf-8")


def test_every_comparison_is_a_row_of_its_package_and_every_row_is_tested() -> None:
    of_verl, of_trl = PAGE.split("\n## TRL\n")
    for package, rows in (("verl", of_verl), ("trl", of_trl)):
        source = (ROOT / f"tests/parity/test_{package}.py").read_text(encoding="utf-8")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        tests = {node.name for node in functions if node.name.startswith("test_")}
        assert set(re.findall(r"`(test_\w+)`", rows)) == tests
        for row in re.findall(r"^\|(?! (?:bapo|what|---)).*$", rows, flags=re.MULTILINE):
            assert re.search(r"`test_\w+` \|$", row), row


def test_the_page_has_the_versions_that_are_installed() -> None:
    for package, name, file in (
        ("verl", "verl", "tests/parity/verl-requirements.txt"),
        ("trl", "TRL", "benchmarks/trl-requirements.txt"),
    ):
        requirements = (ROOT / file).read_text(encoding="utf-8")
        pinned = re.search(rf"^{package}==(\S+)$", requirements, flags=re.MULTILINE)
        assert pinned is not None
        assert f"**{name} {pinned[1]}**" in PAGE
