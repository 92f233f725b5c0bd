"""Resolves a run's `model.path` to a model directory on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.common.layout import MODEL_SCHEME
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreClientSettings
from services.model.stored import HUB, fetch_from_hub, fetch_model
from services.stack.stack import find_stack


def ensure_model(config: RunConfig, home: Path, console: Console) -> Path:
    """The directory of the initial model; builds the tiny one on first use, fetches another."""
    path = config.model.path
    if path.startswith((MODEL_SCHEME, HUB)):
        place = home / "models" / hashlib.sha256(path.encode()).hexdigest()[:16]
        place.parent.mkdir(parents=True, exist_ok=True)
        return fetch_from_hub(path, place) if path.startswith(HUB) else _fetched(path, home, place)
    if path != "tiny":
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise BapoError(
                f"model.path {directory} is not a model directory: it has no config.json; give a "
                "Hugging Face directory, hf://organisation/name, or `tiny`"
            )
        return directory.resolve()
    from services.model.tiny import build_tiny_model

    directory = home / "models" / "tiny"
    if not (directory / "config.json").is_file():
        directory.parent.mkdir(parents=True, exist_ok=True)
        if not console.is_terminal:
            console.print("building the tiny base model (once, a minute or two)")
        with Progress(console=console) as progress:
            bar = progress.add_task("building the tiny base model (once)", total=None)

            def show(done: int, total: int, loss: float) -> None:
                progress.update(
                    bar,
                    completed=done,
                    total=total,
                    description=(f"building the tiny base model (once), loss {loss:.3f}"),
                )

            build_tiny_model(directory, seed=0, progress=show)
    return directory


def _fetched(path: str, home: Path, place: Path) -> Path:
    """A model of the object store of the stack that runs."""
    endpoints = find_stack(home)
    store = ObjectStoreClientSettings.load().s3 if endpoints is None else endpoints.object_store
    return fetch_model(path, ObjectStore(store), place)
