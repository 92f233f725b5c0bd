"""`bapo model`: models that come with bapo."""

from __future__ import annotations

from pathlib import Path

import click

from services.model.resolve import TINY_MODEL, TINY_VISION_MODEL


@click.group
def model() -> None:
    """Show or rebuild models that come with bapo."""


@model.command
@click.option(
    "--rebuild",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Train the model again into this new directory, which takes a minute or two; with "
    "--vision ten to twenty.",
)
@click.option("--vision", is_flag=True, help="The model that reads diagrams, `tiny-vision`.")
def tiny(rebuild: Path | None, vision: bool) -> None:
    """Print the directory of the tiny base model.

    The model has 0.85 M parameters and knows the notation of Countdown. With `--vision`, it is
    another one of 2.2 M parameters, which reads the numbers in diagrams of the task `geometry`.
    `--rebuild` trains a model again from its recipe; on another processor the weights differ in the
    last bits.
    """
    if rebuild is None:
        click.echo(TINY_VISION_MODEL if vision else TINY_MODEL)
        return
    from rich.progress import Progress

    with Progress() as progress:
        bar = progress.add_task("training the tiny base model", total=None)

        def show(done: int, total: int, loss: float) -> None:
            description = f"training the tiny base model, loss {loss:.3f}"
            progress.update(bar, completed=done, total=total, description=description)

        if vision:
            from services.model.tiny_vision import build_tiny_vision_model

            build_tiny_vision_model(rebuild, seed=0, progress=show)
        else:
            from services.model.tiny import build_tiny_model

            build_tiny_model(rebuild, seed=0, progress=show)
    click.echo(rebuild)
