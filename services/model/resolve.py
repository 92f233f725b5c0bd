"""Resolves a run's `model.path` to a model directory on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.common.layout import MODEL_SCHEME
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreClientSettings
from services.model.stored import HUB, fetch_from_hub, fetch_model

TINY_MODEL = Path(__file__).with_name("tiny_model")
"""The tiny base model, as `services.model.tiny.build_tiny_model` builds it with seed 0."""
TINY_VISION_MODEL = Path(__file__).with_name("tiny_vision_model")
"""The tiny base model that reads images, as `services.model.tiny_vision.build_tiny_vision_model`
builds it with seed 0."""
BUNDLED_MODELS = {"tiny": TINY_MODEL, "tiny-vision": TINY_VISION_MODEL}
"""Directories of the models that come with bapo, by the `model.path` that stands for them."""


def object_store_of_environment() -> ObjectStore:
    """Returns the object store that `BAPO_S3_*` names. Raises `ConfigError` when they are unset."""
    return ObjectStore(ObjectStoreClientSettings.load().s3)


def ensure_model(
    config: RunConfig,
    home: Path,
    *,
    open_store: Callable[[], ObjectStore] = object_store_of_environment,
) -> Path:
    """Returns the directory of a run's initial model, which is fetched on first use.

    home: directory below which fetched models are kept (`models/`).
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
    if path in BUNDLED_MODELS:
        return BUNDLED_MODELS[path]
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"model.path {directory} is not a model directory: it has no config.json; give a "
            "Hugging Face directory, hf://organisation/name, `tiny` or `tiny-vision`"
        )
    return directory.resolve()
