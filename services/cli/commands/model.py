"""`bapo model`: models that come with bapo."""

from __future__ import annotations

from pathlib import Path

import click

from services.model.resolve import TINY_MODEL


@click.group
def model() -> None:
    """Show or rebuild models that come with bapo."""


@model.command
@click.option(
    "--rebuild",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Train the model again into this directory, which takes a minute or two.",
)
def tiny(rebuild: Path | None) -> None:
    """Print the directory of the tiny base model.

    The model has 0.85 M parameters. `--rebuild` trains it again from its recipe; on another
    processor the weights differ in the last bits.
    """
    if rebuild is None:
        click.echo(TINY_MODEL)
        return
    from rich.progress import Progress

    from services.model.tiny import build_tiny_model

    with Progress() as progress:
        bar = progress.add_task("training the tiny base model", total=None)

        def show(done: int, total: int, loss: float) -> None:
            description = f"training the tiny base model, loss {loss:.3f}"
            progress.update(bar, completed=done, total=total, description=description)

        build_tiny_model(rebuild, seed=0, progress=show)
    click.echo(rebuild)
