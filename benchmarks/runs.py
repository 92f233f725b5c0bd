"""Runs without a trainer, for benchmarks that take its part."""

from __future__ import annotations

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.datasets import load_datasets


def begin_run(client: BufferClient, settings: RunConfig) -> None:
    """Creates the client's run and begins its first attempt, as the trainer does."""
    datasets = load_datasets(settings)
    for dataset in datasets.all:
        client.upload_dataset(dataset.name, dataset.prompts)
    client.create_run(datasets.run_request(settings))
    client.begin_attempt()
