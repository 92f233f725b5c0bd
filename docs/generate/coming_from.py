"""Renders docs/coming-from.md, the table of what other systems' keys are called here."""

from __future__ import annotations

from pathlib import Path

from bapo_core.config.elsewhere import ELSEWHERE

TEMPLATE = Path(__file__).with_suffix(".md")


def render() -> str:
    """Returns the page."""
    rows = [
        " | ".join(
            [
                f"| `{entry.key}`",
                *(
                    ", ".join(f"`{name.removeprefix('actor_rollout_ref.')}`" for name in names)
                    for names in (entry.trl, entry.verl, entry.prime_rl)
                ),
                f"{entry.note} |",
            ]
        )
        for entry in ELSEWHERE
    ]
    rows = [row.replace("|  |", "| |").replace("|  |", "| |") for row in rows]
    return TEMPLATE.read_text(encoding="utf-8").replace("{rows}", "\n".join(rows))
