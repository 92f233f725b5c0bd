"""Resolves a run's `model.path` to a model directory on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.common.layout import MODEL_SCHEME
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreClientSettings
from services.model.stored import HUB, fetch_from_hub, fetch_model


def object_store_of_environment() -> ObjectStore:
    """Returns the object store that `BAPO_S3_*` names. Raises `ConfigError` when they are unset."""
    return ObjectStore(ObjectStoreClientSettings.load().s3)


def ensure_model(
    config: RunConfig,
    home: Path,
    console: Console,
    *,
    open_store: Callable[[], ObjectStore] = object_store_of_environment,
) -> Path:
    """Returns the directory of a run's initial model, which is fetched or built on first use.

    home: directory below which fetched and built models are kept (`models/`).
    console: shows the progress of building the tiny model.
    open_store: returns the object store of a `store://` model; called only for such a model.

    Raises `BapoError` when `model.path` names neither a model directory nor a model that can be
    fetched.
    """
    path = config.model.path
    if path.startswith((MODEL_SCHEME, HUB)):
        directory = home / "models" / hashlib.sha256(path.encode()).hexdigest()[:16]
        directory.parent.mkdir(parents=True, exist_ok=True)
        if path.startswith(HUB):
            return fetch_from_hub(path, directory)
        return fetch_model(path, open_store(), directory)
    if path == "tiny":
        return _ensure_tiny_model(home / "models" / "tiny", console)
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"model.path {directory} is not a model directory: it has no config.json; give a "
            "Hugging Face directory, hf://organisation/name, or `tiny`"
        )
    return directory.resolve()


def _ensure_tiny_model(directory: Path, console: Console) -> Path:
    if (directory / "config.json").is_file():
        return directory
    # Imported here because it imports torch and transformers.
    from services.model.tiny import build_tiny_model

    directory.parent.mkdir(parents=True, exist_ok=True)
    task = "building the tiny base model (once, a minute or two)"
    if not console.is_terminal:
        console.print(task)
    with Progress(console=console) as progress:
        bar = progress.add_task(task, total=None)

        def show(done: int, total: int, loss: float) -> None:
            progress.update(
                bar, completed=done, total=total, description=f"{task}, loss {loss:.3f}"
            )

        build_tiny_model(directory, seed=0, progress=show)
    return directory
