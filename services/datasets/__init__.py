"""Loads the prompts of runs from their sources, and names them by their content.

An address of a data set is a local file, `hf://organisation/name[@revision][:split]`,
`s3://bucket/key`, or `dataset:NAME` for one that `bapo dataset upload` stored.
"""

from services.datasets.dataset import Dataset, digest_of_prompts
from services.datasets.lengths import limit_lengths, tokenize_prompt
from services.datasets.load import (
    RunDatasets,
    load_datasets,
    load_evaluation_sets,
    read_dataset,
    store_dataset,
)
from services.datasets.prepare import prepare_run
from services.datasets.reward_columns import check_reward_columns
from services.datasets.sources import (
    DataSources,
    data_addresses,
    is_local,
    pin_address,
    pin_revisions,
)

__all__ = [
    "DataSources",
    "Dataset",
    "RunDatasets",
    "check_reward_columns",
    "data_addresses",
    "digest_of_prompts",
    "is_local",
    "limit_lengths",
    "load_datasets",
    "load_evaluation_sets",
    "pin_address",
    "pin_revisions",
    "prepare_run",
    "read_dataset",
    "store_dataset",
    "tokenize_prompt",
]
