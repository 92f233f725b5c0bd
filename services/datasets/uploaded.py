"""Reads prompts that were stored in the buffer service by `bapo dataset upload` or REST."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bapo_core.errors import BapoError
from bapo_core.tasks import Payload, Task
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.datasets.dataset import digest_of_prompts

DATASET = "dataset:"


def read_uploaded(address: str, task: Task, buffer: BufferClient) -> list[Payload]:
    """Returns the problems of `dataset:NAME` in their order.

    Raises `BapoError` when there is no such dataset, when its prompts are of another task, or when
    they do not have the digest that was recorded, because an upload was interrupted.
    """
    name = address.removeprefix(DATASET)
    state = buffer.dataset(name) if re.fullmatch(wire.DATASET_NAME, name) else None
    if state is None or state.prompts == 0:
        raise BapoError(f"{address}: there is no such dataset; `bapo dataset list` shows them")
    prompts = list(buffer.dataset_prompts(name))
    if state.digest is not None and digest_of_prompts(prompts) != state.digest:
        raise BapoError(
            f"{address}: its {len(prompts)} prompts do not have the recorded digest "
            f"{state.digest[:12]}; run `bapo dataset upload` again, which completes an upload that "
            "was interrupted"
        )
    _check_task(address, task, prompts)
    return [prompt.payload for prompt in prompts]


def _check_task(address: str, task: Task, prompts: Sequence[wire.PromptItem]) -> None:
    others = {prompt.task for prompt in prompts} - {task.name}
    if others:
        raise BapoError(
            f"{address}: its prompts are of the task {', '.join(sorted(others))}, but task.name is "
            f"{task.name}; change one of them"
        )
