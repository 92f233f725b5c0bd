"""Loads or generates the prompts of a run, and names them by their content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.rewards import check_reward
from bapo_core.tasks import Payload, SyntheticTask, Task, get_task
from services.buffer.api import wire
from services.datasets.dataset import Dataset, digest_of_prompts
from services.datasets.files import RowError
from services.datasets.sources import DataSources, open_rows
from services.datasets.uploaded import DATASET, read_uploaded
from services.verifier.api.wire import LARGEST_PAYLOAD

NO_SERVICES = DataSources()


def load_datasets(config: RunConfig, sources: DataSources = NO_SERVICES) -> tuple[Dataset, Dataset]:
    """Returns the training and the held-out prompts of a run.

    Raises `BapoError` when a data set cannot be read, when the two overlap, or when there are fewer
    training prompts than a step may draw.
    """
    train, test = _load_both(config, sources)
    held_out = {prompt.uid for prompt in test.prompts}
    overlap = [prompt.uid for prompt in train.prompts if prompt.uid in held_out]
    if overlap:
        raise BapoError(
            f"{len(overlap)} training prompts are held-out prompts too (the first: {overlap[0]}); "
            "remove them from one of task.train_path and task.test_path"
        )
    needed = config.rollout.prompts_per_step * config.rollout.max_generation_rounds
    if len(train.prompts) < needed:
        raise BapoError(
            f"there are {len(train.prompts)} training prompts, but one step may draw {needed}; "
            "lower rollout.prompts_per_step or rollout.max_generation_rounds, or provide more "
            "prompts"
        )
    return train, test


def _load_both(config: RunConfig, sources: DataSources) -> tuple[Dataset, Dataset]:
    settings = config.task
    task = get_task(settings.name, **settings.options)
    check_reward(task, config.reward)
    if (settings.train_path is None) != (settings.test_path is None):
        missing = "test_path" if settings.test_path is None else "train_path"
        raise BapoError(
            f"task.{missing} is not set; set both addresses, or neither to generate the prompts"
        )
    if settings.train_path is not None and settings.test_path is not None:
        columns = settings.columns
        return (
            read_dataset(
                task, settings.train_path, sources, columns, settings.train_prompts, split="train"
            ),
            read_dataset(
                task, settings.test_path, sources, columns, settings.test_prompts, split="test"
            ),
        )
    if not isinstance(task, SyntheticTask):
        raise BapoError(
            f"task {settings.name} cannot generate prompts; set task.train_path and task.test_path"
        )
    try:
        train, test = task.generate_split(
            settings.data_seed, train=settings.train_prompts, test=settings.test_prompts
        )
    except ValueError as error:
        raise BapoError(str(error)) from error
    return _dataset(task, train, "train"), _dataset(task, test, "test")


def read_dataset(
    task: Task,
    address: str,
    sources: DataSources,
    columns: Mapping[str, str],
    limit: int | None = None,
    *,
    split: str = "",
) -> Dataset:
    """Reads the prompts of a data set.

    columns: name of a column for each of the task's columns that is named otherwise; those of
    uploaded prompts are the task's already. limit: most rows to read. split: part of the dataset's
    name.

    The first of equal problems is kept. Raises `BapoError`, which names the row, for a data set
    that cannot be read.
    """
    unknown = sorted(set(columns) - set(task.columns))
    if unknown:
        raise BapoError(
            f"task.columns: task {task.name} has no column {', '.join(unknown)}; its columns are "
            f"{', '.join(task.columns)}"
        )
    if address.startswith(DATASET):
        uploaded = read_uploaded(address, task, sources.connect())
        reached = limit if limit is not None and len(uploaded) >= limit else None
        return replace(_dataset(task, uploaded[:limit], split), limit=reached)
    theirs = {column: columns.get(column, column) for column in task.columns}
    problems: dict[str, Payload] = {}
    left_out = number = 0
    try:
        rows = open_rows(address, list(theirs.values()), limit, sources)
        for number, row in enumerate(islice(rows, limit), start=1):
            problem = _parse_row(task, {ours: row[name] for ours, name in theirs.items()}, number)
            if problem is None:
                left_out += 1
            else:
                problems.setdefault(task.uid(problem), problem)
    except RowError as error:
        raise BapoError(f"{address}, {error}") from error
    except ValueError as error:
        raise BapoError(f"{address}: {error}") from error
    if not problems:
        raise BapoError(f"{address}: has no row with an answer; give a data set that has problems")
    dataset = _dataset(task, list(problems.values()), split)
    return replace(dataset, left_out=left_out, limit=limit if number == limit else None)


def _parse_row(task: Task, row: Mapping[str, Any], number: int) -> Payload | None:
    try:
        problem = task.parse_row(row)
        _check_text(problem)
        if len(json.dumps(problem)) > LARGEST_PAYLOAD:
            raise ValueError(f"the problem is longer than {LARGEST_PAYLOAD} bytes; shorten it")
    except ValueError as error:
        raise RowError(number, str(error)) from error
    return problem


def _check_text(value: Any) -> None:
    """Raises `ValueError` for text that the database cannot store."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError(f"{value!r:.80} holds a NUL character; remove it")
        value.encode()
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def _dataset(task: Task, payloads: Sequence[Payload], split: str) -> Dataset:
    prompts = [
        wire.PromptItem(uid=task.uid(payload), task=task.name, payload=_plain(payload))
        for payload in payloads
    ]
    digest = digest_of_prompts(prompts)[:12]
    name = "-".join(filter(None, (task.name, split, digest)))
    return Dataset(name, prompts)


def _plain(payload: Payload) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(payload)))
    return plain


def keep_prompts(config: RunConfig, run: wire.RunState, train: Dataset, test: Dataset) -> RunConfig:
    """Returns the configuration with which a run that exists goes on: with its own task's data.

    Its data sets may have moved, or have other revisions, as long as the prompts are the same.
    Raises `BapoError` when they are not, because the results would be a mixture of two.
    """
    for key, recorded, dataset in (
        ("train_path", run.train_dataset, train),
        ("test_path", run.test_dataset, test),
    ):
        if dataset.name != recorded:
            present, former = (getattr(task, key) for task in (config.task, run.config.task))
            raise BapoError(
                f"task.{key}: run {run.name!r} was created with other prompts ({recorded} of "
                f"{former or 'generated ones'}) than {present or 'the task generates'} has now "
                f"({dataset.name}); give the former data or revision, or choose another run name"
            )
    task = run.config.task.model_copy(
        update={"name": config.task.name, "options": config.task.options}
    )
    return config.model_copy(update={"task": task})
