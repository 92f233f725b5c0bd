"""Checks that a run's reward functions can be called for all of its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from bapo_core.errors import BapoError
from bapo_core.reward_files import RewardFunctions
from services.datasets.dataset import Dataset


def check_reward_columns(
    functions: RewardFunctions, text: str, datasets: Sequence[Dataset]
) -> None:
    """Raises `BapoError`, which names file, function and prompt, for a function without a column.

    text: the text of the functions' file, which is not run. A file without one of the functions, or
    with one of another signature, raises `ConfigError`.
    """
    functions.check_text(text)
    for name, required in functions.required_columns(text).items():
        for dataset in datasets:
            for number, prompt in enumerate(dataset.prompts, start=1):
                columns = prompt.payload["columns"]
                missing = [column for column in required if column not in columns]
                if missing:
                    source = dataset.address or f"dataset {dataset.name}"
                    raise BapoError(
                        f"{functions.file}: {name} needs the column {missing[0]}, which prompt "
                        f"{number} of {source} has not (it has prompt"
                        f"{''.join(f', {column}' for column in columns)}); add it to the data, map "
                        "it in task.columns, or give the argument a default"
                    )
