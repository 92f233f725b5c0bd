"""Renders docs/coming-from.md, the tables of what to use here for other systems' keys."""

from __future__ import annotations

from pathlib import Path

from bapo_core.config.elsewhere import ELSEWHERE, WITHOUT_KEY

TEMPLATE = Path(__file__).with_suffix(".md")


def render() -> str:
    """Returns the page."""
    keys = [
        [f"`{entry.key}`", *_names(entry.trl, entry.verl, entry.prime_rl), entry.note]
        for entry in ELSEWHERE
    ]
    without_key = [
        [*_names(entry.trl, entry.verl, entry.prime_rl), entry.advice] for entry in WITHOUT_KEY
    ]
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("{keys}", _rows(keys)).replace("{without_key}", _rows(without_key))


def _names(*systems: tuple[str, ...]) -> list[str]:
    return [
        ", ".join(f"`{name.removeprefix('actor_rollout_ref.')}`" for name in names)
        for names in systems
    ]


def _rows(cells: list[list[str]]) -> str:
    """Returns the rows of a table; empty cells are one space wide."""
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in cells)
