"""Prepares a run: loads, checks and stores its prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bapo_core.config import RunConfig
from bapo_core.reward_files import stored_digest
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.datasets.dataset import Dataset
from services.datasets.lengths import limit_lengths
from services.datasets.load import RunDatasets, keep_prompts, load_datasets, store_dataset
from services.datasets.reward_columns import check_reward_columns
from services.datasets.sources import DataSources
from services.model.vision import check_model


def load_prompts(
    config: RunConfig, model: Path, sources: DataSources, *, check_lengths: bool = True
) -> RunDatasets:
    """Returns the prompts of a run, which its model and its engine can take.

    model: directory with the configuration and the tokenizer of the initial model.
    check_lengths: whether prompts that are too long are refused, or left out.

    Raises `BapoError` when a data set cannot be read, when prompts are too long or too few, and
    when they have images that the model or its engine cannot take.
    """
    datasets = load_datasets(config, sources)
    if datasets.train.images is not None:
        check_model(model, config.rollout.engine.kind)
    return limit_lengths(config, datasets, model) if check_lengths else datasets


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

    Raises `BapoError` as `load_prompts` does, when the prompts are not those of the existing run,
    and when the reward functions are not stored or cannot be called for a prompt.
    """
    # An existing run keeps its prompts, even if it was created before lengths were checked.
    check_lengths = existing is None or config.task.drop_long_prompts
    datasets = load_prompts(config, model, sources, check_lengths=check_lengths)
    functions = config.task.functions
    if functions is not None:
        text = buffer.reward_file(stored_digest(functions))
        check_reward_columns(functions, text, datasets.all)
    if existing is not None:
        config = keep_prompts(config, existing, datasets)
    for dataset in datasets.all:
        store_dataset(buffer, dataset)
        show(dataset)
    return datasets.run_request(config)
