"""Loads or generates the prompts of a run, and names them by their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.tasks import Payload, SyntheticTask, Task, get_task
from services.buffer.api.wire import PromptItem


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts in a fixed order, whose name contains a digest of them: the same on every machine."""

    name: str
    prompts: Sequence[PromptItem]


def load_datasets(config: RunConfig) -> tuple[Dataset, Dataset]:
    """Returns the training and the held-out prompts of a run.

    Raises `BapoError` when a file cannot be read, when the two overlap, or when there are fewer
    training prompts than a step may draw.
    """
    settings = config.task
    try:
        task = get_task(settings.name, **settings.options)
        train, test = _payloads(config, task)
    except OSError as error:
        raise BapoError(
            f"{error.filename}: {error.strerror}; check task.train_path and task.test_path"
        ) from error
    except ValueError as error:
        raise BapoError(str(error)) from error
    held_out = {task.uid(payload) for payload in test}
    overlap = [uid for uid in map(task.uid, train) if uid in held_out]
    if overlap:
        raise BapoError(
            f"{len(overlap)} training prompts are held-out prompts too (the first: {overlap[0]}); "
            "remove them from one of task.train_path and task.test_path"
        )
    needed = config.rollout.prompts_per_step * config.rollout.max_generation_rounds
    if len(train) < needed:
        raise BapoError(
            f"there are {len(train)} training prompts, but one step may draw {needed}; lower "
            "rollout.prompts_per_step or rollout.max_generation_rounds, or provide more prompts"
        )
    return _dataset(task, "train", train), _dataset(task, "test", test)


def _payloads(config: RunConfig, task: Task) -> tuple[list[Payload], list[Payload]]:
    settings = config.task
    train: list[Payload] | None = None
    test: list[Payload] | None = None
    if settings.train_path is not None:
        train = task.load(settings.train_path, limit=settings.train_prompts)
    if settings.test_path is not None:
        test = task.load(settings.test_path, limit=settings.test_prompts)
    if train is not None and test is not None:
        return train, test
    if (train is None) != (test is None):
        missing = "test_path" if test is None else "train_path"
        raise ValueError(
            f"task.{missing} is not set; set both files, or neither to generate the prompts"
        )
    if not isinstance(task, SyntheticTask):
        raise ValueError(
            f"task {settings.name} cannot generate prompts; set task.train_path and task.test_path"
        )
    return task.generate_split(
        settings.data_seed, train=settings.train_prompts, test=settings.test_prompts
    )


def _dataset(task: Task, split: str, payloads: Sequence[Payload]) -> Dataset:
    prompts = [
        PromptItem(uid=task.uid(payload), task=task.name, payload=_plain(payload))
        for payload in payloads
    ]
    content = json.dumps([prompt.model_dump() for prompt in prompts], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Dataset(f"{task.name}-{split}-{digest}", prompts)


def _plain(payload: Payload) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(payload)))
    return plain
