"""Plug-ins are what installed distributions add to a registry by entry points."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from bapo_core.errors import BapoError


def plug_in_names(group: str) -> set[str]:
    """Returns the names that installed distributions give to the entry points of `group`."""
    return {point.name for point in entry_points(group=group)}


def load_plug_in(
    group: str, kind: str, name: str, *, built_in: Iterable[str], error: type[BapoError]
) -> Any:
    """Loads the entry point `name` of `group`.

    kind: what the group's entry points are, for messages, as in "task". built_in: the names that
    need no plug-in.

    Raises `error` for a name that is unknown, ambiguous, or cannot be loaded.
    """
    points = list(entry_points(group=group, name=name))
    if not points:
        known = ", ".join(sorted({*built_in, *plug_in_names(group)}))
        raise error(f"no {kind} {name!r}; known {kind}s: {known}")
    if len({point.value for point in points}) > 1:
        raise error(
            f"{kind} {name}: installed more than once, as {' and '.join(map(_origin, points))}; "
            "uninstall all but one"
        )
    try:
        return points[0].load()
    except (ImportError, AttributeError) as cause:
        raise error(
            f"{kind} {name}: cannot load {_origin(points[0])}: {cause}; correct its entry point, "
            "or install the package again"
        ) from cause


@contextmanager
def report_failures(kind: str, name: str, error: type[BapoError]) -> Iterator[None]:
    """Raises `error`, with the place of the cause, for whatever the code of a plug-in raises."""
    try:
        yield
    except error as cause:  # It says already what is wrong.
        raise error(f"{kind} {name}: {cause}") from cause
    except Exception as cause:
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        raise error(
            f"{kind} {name} failed: {type(cause).__name__}: {cause} ({Path(frame.filename).name}, "
            f"line {frame.lineno})"
        ) from cause


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name}" if point.dist else point.value
