"""Prepares a run: loads, checks and stores its prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.datasets.dataset import Dataset
from services.datasets.lengths import limit_lengths
from services.datasets.load import keep_prompts, load_datasets, store_dataset
from services.datasets.sources import DataSources
from services.model.vision import check_model


def prepare_run(
    config: RunConfig,
    model: Path,
    sources: DataSources,
    buffer: BufferClient,
    *,
    show: Callable[[Dataset], None],
    existing: wire.RunState | None = None,
) -> wire.RunCreate:
    """Stores the prompts of a run in the buffer service; returns the request that creates the run.

    model: directory with the configuration and the tokenizer of the initial model.
    show: called with each dataset that is stored.
    existing: the state of the run if it exists, which must have the same prompts.

    Raises `BapoError` when a data set cannot be read, when prompts are too long or too few, when
    they have images that the model or its engine cannot take, and when they are not the prompts of
    the existing run.
    """
    datasets = load_datasets(config, sources)
    if datasets.train.images is not None:
        check_model(model, config.rollout.engine.kind)
    # An existing run keeps its prompts, even if it was created before lengths were checked.
    if existing is None or config.task.drop_long_prompts:
        datasets = limit_lengths(config, datasets, model)
    if existing is not None:
        config = keep_prompts(config, existing, datasets)
    for dataset in datasets.all:
        store_dataset(buffer, dataset)
        show(dataset)
    return datasets.run_request(config)
