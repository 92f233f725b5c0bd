"""Prompts of runs: where they come from, and how they are named by their content.

An address of a data set is a local file, `hf://organisation/name[@revision][:split]`,
`s3://bucket/key`, or `dataset:NAME` for one that `bapo dataset upload` stored.
"""

from services.datasets.dataset import Dataset, digest_of_prompts
from services.datasets.load import keep_prompts, load_datasets, read_dataset
from services.datasets.sources import DataSources, pin_address, pin_revisions

__all__ = [
    "DataSources",
    "Dataset",
    "digest_of_prompts",
    "keep_prompts",
    "load_datasets",
    "pin_address",
    "pin_revisions",
    "read_dataset",
]
