"""Tasks with verifiable rewards, by name.

Other distributions add tasks by the entry-point group `bapo.tasks` (docs/adding-a-task.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from bapo_core.errors import TaskError
from bapo_core.plug_ins import find, plug_in_names
from bapo_core.tasks.base import (
    ImageTask,
    Message,
    Payload,
    SyntheticTask,
    Task,
    Verdict,
    VerdictStatus,
    is_solved,
    normalise_answer,
)
from bapo_core.tasks.countdown import CountdownTask
from bapo_core.tasks.digits import DistinctTask, SortingTask
from bapo_core.tasks.function import FunctionTask
from bapo_core.tasks.geometry import GeometryTask
from bapo_core.tasks.mathematics import MathTask
from bapo_core.tasks.reasoning_gym import ReasoningGymTask

__all__ = [
    "ENTRY_POINTS",
    "FunctionTask",
    "ImageTask",
    "Message",
    "Payload",
    "SyntheticTask",
    "Task",
    "Verdict",
    "VerdictStatus",
    "get_task",
    "is_solved",
    "normalise_answer",
    "task_names",
]

ENTRY_POINTS = "bapo.tasks"
"""The group of entry points: task name → callable that takes the options and returns a `Task`."""

_TASKS: dict[str, Callable[..., Task]] = {
    "countdown": CountdownTask,
    "distinct": DistinctTask,
    "function": FunctionTask,
    "geometry": GeometryTask,
    "math": MathTask,
    "reasoning_gym": ReasoningGymTask,
    "sorting": SortingTask,
}


def task_names() -> list[str]:
    """Returns the names of all tasks, without loading a plug-in."""
    return sorted({*_TASKS, *plug_in_names(ENTRY_POINTS)})


def _explain_options(factory: Callable[..., Task], options: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the names of options; None if the task has them all."""
    known = [
        name
        for name, parameter in signature(factory).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    unknown = sorted(set(options) - set(known))
    if not unknown or not known:
        return None
    return f"it has no option {unknown[0]}; its options are {', '.join(known)}"


def get_task(name: str, **options: Any) -> Task:
    """Builds the task `name` with its options (`task.options` of the configuration).

    Raises `TaskError` as `find` does, and for an option that the task refuses.
    """
    factory = find(name, _TASKS, group=ENTRY_POINTS, kind="task", error=TaskError)
    try:
        task = factory(**options)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {name}: {_explain_options(factory, options) or error}") from error
    if not isinstance(task, Task):
        raise TaskError(
            f"task {name}: its entry point makes a {type(task).__name__}, which lacks some of "
            "name, uid, render, verify, columns, parse_row"
        )
    return task
