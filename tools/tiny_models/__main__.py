"""Trains the tiny models again, each into a new directory: `python -m tools.tiny_models DIRECTORY`.

A model takes a minute or two, the one that reads images ten to twenty. On another processor the
weights differ from those that come with bapo in the last bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tools.tiny_models.digits import build_tiny_distinct_model, build_tiny_sorting_model
from tools.tiny_models.text import build_tiny_model
from tools.tiny_models.vision import build_tiny_vision_model

RECIPES: dict[str, Callable[..., Any]] = {
    "tiny": build_tiny_model,
    "tiny-sorting": build_tiny_sorting_model,
    "tiny-distinct": build_tiny_distinct_model,
    "tiny-vision": build_tiny_vision_model,
}
"""The recipe of each bundled model, by its `model.path`."""


def main() -> None:
    """Trains the models named on the command line."""
    parser = argparse.ArgumentParser(description="Trains the tiny models again.")
    parser.add_argument("directory", type=Path, help="directory of the models' new directories")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=[*RECIPES])
    arguments = parser.parse_args()
    with Progress() as progress:
        for name in arguments.models:
            bar = progress.add_task(f"training {name}", total=None)

            def show(done: int, total: int, loss: float, name: str = name, bar: Any = bar) -> None:
                description = f"training {name}, loss {loss:.3f}"
                progress.update(bar, completed=done, total=total, description=description)

            RECIPES[name](arguments.directory / name, seed=0, progress=show)


if __name__ == "__main__":
    main()
