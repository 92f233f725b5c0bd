"""Tasks with verifiable rewards, by name.

Tasks of other distributions are found by the entry-point group `bapo.tasks`
(docs/adding-a-task.md).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bapo_core.tasks.base import Message, Payload, SyntheticTask, Task, Verdict, VerdictStatus
from bapo_core.tasks.countdown import CountdownTask
from bapo_core.tasks.mathematics import MathTask

__all__ = [
    "ENTRY_POINTS",
    "Message",
    "Payload",
    "SyntheticTask",
    "Task",
    "Verdict",
    "VerdictStatus",
    "get_task",
    "task_names",
]

ENTRY_POINTS = "bapo.tasks"
"""The entry-point group: task name → a callable that takes the options and returns a `Task`."""

_TASKS: dict[str, Callable[..., Task]] = {"countdown": CountdownTask, "math": MathTask}


def task_names() -> list[str]:
    """The names that `get_task` knows. Loads no plug-in."""
    return sorted({*_TASKS, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def get_task(name: str, **options: Any) -> Task:
    """The task `name` with its options (`task.options` of the configuration).

    Raises `ValueError` for an unknown name or option, an option's bad value, or a plug-in that
    cannot be loaded.
    """
    factory = _TASKS.get(name) or _plug_in(name)
    try:
        task = factory(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {name}: {error}") from error
    if not isinstance(task, Task):
        raise ValueError(
            f"task {name}: its entry point makes a {type(task).__name__}, which lacks some of "
            "name, uid, render, verify, load"
        )
    return task


def _plug_in(name: str) -> Callable[..., Task]:
    points = list(entry_points(group=ENTRY_POINTS, name=name))
    if not points:
        raise ValueError(f"no task {name!r}; known tasks: {', '.join(task_names())}")
    if len({point.value for point in points}) > 1:
        raise ValueError(
            f"task {name}: installed more than once, as {' and '.join(map(_origin, points))}; "
            "uninstall all but one"
        )
    try:
        factory: Callable[..., Task] = points[0].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"task {name}: cannot load {_origin(points[0])}: {error}; install it again"
        ) from error
    return factory


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name}" if point.dist else point.value
