"""Plug-ins are what installed distributions add to a registry by entry points."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from bapo_core.errors import BapoError

T = TypeVar("T")


def plug_in_names(group: str) -> set[str]:
    """Returns the names that installed distributions give to the entry points of `group`."""
    return {point.name for point in entry_points(group=group)}


def find(
    name: str, built_in: Mapping[str, T], *, group: str, kind: str, error: type[BapoError]
) -> T:
    """Returns what is built in by this name, or what an installed distribution adds by it.

    group: the entry points that add to `built_in`. kind: what both are, for messages, as in "task".

    Raises `error` for a name that is unknown or ambiguous, and for an entry point that cannot be
    loaded.
    """
    point = find_entry_point(name, built_in, group=group, kind=kind, error=error)
    if point is None:
        return built_in[name]
    try:
        loaded: T = point.load()
    except (ImportError, AttributeError) as cause:
        raise error(
            f"{kind} {name}: cannot load {_origin(point)}: {cause}; correct its entry point, "
            "or install the package again"
        ) from cause
    return loaded


def find_entry_point(
    name: str, built_in: Collection[str], *, group: str, kind: str, error: type[BapoError]
) -> EntryPoint | None:
    """Returns the entry point of a name, which is not loaded; None if the name is built in.

    Raises `error` for a name that is unknown or ambiguous.
    """
    points = list(entry_points(group=group, name=name))
    origins = " and ".join(sorted({_origin(point) for point in points}))
    if name in built_in:
        if points:
            raise error(
                f"{kind} {name}: bapo has a {kind} of this name, and so has {origins}, which would "
                "be ignored; rename its entry point, or uninstall the package"
            )
        return None
    if not points:
        known = ", ".join(sorted({*built_in, *plug_in_names(group)}))
        raise error(f"no {kind} {name!r}; known {kind}s: {known}")
    if len({point.value for point in points}) > 1:
        raise error(f"{kind} {name}: installed more than once, as {origins}; uninstall all but one")
    return points[0]


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
