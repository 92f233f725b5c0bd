"""Tasks with verifiable rewards, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bapo_core.tasks.base import Message, Payload, SyntheticTask, Task, Verdict, VerdictStatus
from bapo_core.tasks.countdown import CountdownTask

__all__ = [
    "Message",
    "Payload",
    "SyntheticTask",
    "Task",
    "Verdict",
    "VerdictStatus",
    "get_task",
    "task_names",
]

_TASKS: dict[str, Callable[..., Task]] = {"countdown": CountdownTask}


def task_names() -> list[str]:
    """The names that `get_task` knows."""
    return sorted(_TASKS)


def get_task(name: str, **options: Any) -> Task:
    """The task `name` with its options (`task.options` of the configuration).

    Raises `ValueError` for an unknown name or option, or an option's bad value.
    """
    if name not in _TASKS:
        raise ValueError(f"no task {name!r}; known tasks: {', '.join(task_names())}")
    try:
        return _TASKS[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {name}: {error}") from error
