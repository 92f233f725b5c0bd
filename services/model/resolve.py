"""Resolves a run's `model.path` to a model directory on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.common.layout import MODEL_SCHEME
from services.common.objectstore import S3_SCHEME, ObjectStore
from services.common.settings import ObjectStoreClientSettings
from services.model.json_files import read_object, section_of
from services.model.stored import HUB, fetch_from_bucket, fetch_from_hub, fetch_model, pin_hub_model

TINY_MODEL = Path(__file__).with_name("tiny_model")
"""The tiny base model, which `make tiny-models` trains with seed 0."""
TINY_VISION_MODEL = Path(__file__).with_name("tiny_vision_model")
"""The tiny base model that reads images, from the same recipes."""
BUNDLED_MODELS = {
    "tiny": TINY_MODEL,
    "tiny-sorting": Path(__file__).with_name("tiny_sorting_model"),
    "tiny-distinct": Path(__file__).with_name("tiny_distinct_model"),
    "tiny-vision": TINY_VISION_MODEL,
}
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
    open_store: returns the object store of a `store://` or `s3://` model; called only for such a
        model.

    Raises `BapoError` when `model.path` names neither a model directory nor a model that can be
    fetched, and when the engine cannot give the model sequences as long as the configuration's.
    """
    directory = find_model(config.model.path, home, open_store=open_store)
    if config.rollout.engine.kind == "vllm":
        _check_sequence_length(config, directory)
    return directory


def pin_model(
    config: RunConfig,
    home: Path,
    *,
    open_store: Callable[[], ObjectStore] = object_store_of_environment,
) -> RunConfig:
    """Returns the configuration with the content of a bucket's model, or the commit of a hub's.

    A run that is resumed then has the same model, or ends with an error.
    """
    path = config.model.path
    if path.startswith(HUB):
        pinned = pin_hub_model(path)
    elif path.startswith(S3_SCHEME) and "#" not in path:
        pinned = f"{path}#{find_model(path, home, open_store=open_store).name}"
    else:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": pinned})})


def find_model(
    path: str,
    home: Path,
    *,
    open_store: Callable[[], ObjectStore] = object_store_of_environment,
) -> Path:
    """Returns the directory of the model that `model.path` names, as `ensure_model` does."""
    directory = _fetch_or_locate(path, home / "models", open_store)
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"model.path {path} is not a model directory: it has no config.json; give a Hugging "
            "Face directory, hf://organisation/name, s3://bucket/prefix, or one of "
            f"{', '.join(BUNDLED_MODELS)}"
        )
    return directory


def _fetch_or_locate(path: str, models: Path, open_store: Callable[[], ObjectStore]) -> Path:
    if path.startswith(S3_SCHEME):
        address, _, content = path.partition("#")
        if content and (models / content).is_dir():
            return models / content
        return fetch_from_bucket(address, open_store(), models, content)
    if path.startswith((MODEL_SCHEME, HUB)):
        directory = models / hashlib.sha256(path.encode()).hexdigest()[:16]
        models.mkdir(parents=True, exist_ok=True)
        if path.startswith(HUB):
            return fetch_from_hub(path, directory)
        return fetch_model(path, open_store(), directory)
    if path in BUNDLED_MODELS:
        return BUNDLED_MODELS[path]
    return Path(path).resolve()


def _check_sequence_length(config: RunConfig, directory: Path) -> None:
    """Raises `BapoError` if sequences may be longer than vLLM accepts for the model.

    vLLM would refuse to start, and replicas would try again and again. Models with scaled rotary
    embeddings are left to vLLM, which derives their limit from the scaling.
    """
    file = directory / "config.json"
    content = read_object(file)
    content = section_of(content, "text_config", file) or content
    limit = content.get("max_position_embeddings")
    rope = section_of(content, "rope_parameters", file)
    rope = rope or section_of(content, "rope_scaling", file)
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if isinstance(limit, int) and not scaled and longest > limit:
        raise BapoError(
            f"model.path {config.model.path}: the model has {limit} positions, but a prompt and "
            f"its response may have {longest} tokens (rollout.max_prompt_tokens "
            f"{rollout.max_prompt_tokens} + rollout.max_response_tokens "
            f"{rollout.max_response_tokens}), for which vLLM does not start; lower one of them, or "
            "take a model with more positions"
        )
