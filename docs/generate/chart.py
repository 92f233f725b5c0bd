"""Generates the table of values in the README of the chart.

The comment above a value in `values.yaml` becomes its description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/bapo"
HEADING = "## Values\n"
_KEY = re.compile(r"^( *)([A-Za-z0-9]+):")


@dataclass(frozen=True, slots=True)
class Value:
    """A value that users can set, or a section of values."""

    path: str
    default: Any
    description: str
    section: bool

    def row(self) -> str:
        default = "" if self.section else f"`{json.dumps(self.default)}`"
        return f"| `{self.path}` | {default} | {self.description} |"


def values(text: str) -> Iterator[Value]:
    """Yields the values of a `values.yaml` in its order.

    Raises `ValueError` for a value without a comment.
    """
    comments = comments_of(text)
    documented = [path.split(".") for path, comment in comments.items() if comment]
    sections = {".".join(path[:depth]) for path in documented for depth in range(1, len(path))}

    def walk(node: dict[str, Any], prefix: str) -> Iterator[Value]:
        for key, default in node.items():
            path = f"{prefix}{key}"
            section, comment = path in sections, comments.get(path, "")
            if comment:
                yield Value(path, default, comment, section)
            elif not section:
                raise ValueError(f"values.yaml: {path} has no comment above it")
            if section:
                yield from walk(default, f"{path}.")

    return walk(yaml.safe_load(text), "")


def comments_of(text: str) -> dict[str, str]:
    """Returns the comment right above each key, or an empty string, by the key's path."""
    comments: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
            continue
        if match := _KEY.match(line):
            path[len(match[1]) // 2 :] = [match[2]]
            comments[".".join(path)] = " ".join(comment)
        comment = []
    return comments


def table(text: str) -> str:
    """Returns the values of a `values.yaml` as a Markdown table."""
    rows = [value.row() for value in values(text)]
    return "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def render() -> str:
    """Returns the README with the current table of values below its heading."""
    head, heading, _ = (CHART / "README.md").read_text().partition(HEADING)
    if not heading:
        raise ValueError(f"README.md has no line {HEADING.strip()!r}")
    return f"{head}{HEADING}\n{table((CHART / 'values.yaml').read_text())}"
