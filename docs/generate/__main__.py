"""Writes the generated pages: `python -m docs.generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate import (
    chart,
    choosing_a_method,
    coming_from,
    commands,
    configuration,
    environment,
    methods,
    readme,
    reproduction,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme.render,
    "docs/configuration.md": configuration.render,
    "docs/config.schema.json": configuration.render_schema,
    "docs/methods.md": methods.render,
    "docs/cli.md": commands.render,
    "docs/environment.md": environment.render,
    "docs/coming-from.md": coming_from.render,
    "docs/choosing-a-method.md": choosing_a_method.render,
    "docs/reproduction.md": reproduction.render,
    "charts/bapo/README.md": chart.render,
}
"""The function that renders each page, by the page's path in the repository."""


def main() -> None:
    """Writes every page."""
    for path, render in PAGES.items():
        (ROOT / path).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
