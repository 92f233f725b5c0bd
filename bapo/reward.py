"""Writes reward functions of a script or a notebook to the file that a run stores."""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from bapo_core.errors import ConfigError
from services.common.files import write_private

RewardFunction = Callable[..., Any]
"""A reward function with TRL's signature (docs/adding-a-task.md)."""


def write_functions(functions: Sequence[RewardFunction], directory: Path) -> list[str]:
    """Writes the source of reward functions to one file; returns their names for `task.reward`.

    The verifier runs the file in a process of its own, which has nothing of this one's: what a
    function uses must be defined or imported in it, or be another one of `functions`.

    directory: where the file is written, by the digest of its text.

    Raises `ConfigError` for a function without source, and for one that uses other values.
    """
    names = [_name_of(function) for function in functions]
    for name, function in zip(names, functions, strict=True):
        _refuse_outer_values(name, function, names)
    sources = [textwrap.dedent(inspect.getsource(function)) for function in functions]
    # Annotations may name what only the script or the notebook has imported.
    text = "\n\n".join(["from __future__ import annotations", *sources])
    path = directory / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    directory.mkdir(parents=True, exist_ok=True)
    write_private(path, text)
    return [f"{path}:{name}" for name in names]


def _name_of(function: RewardFunction) -> str:
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise ConfigError(
            f"reward: {name or function!r} is no function with a name; define it with `def`, or "
            "give `task.reward` a file"
        )
    try:
        inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"reward: the source of {name} is not known ({error}); write it to a file, and set "
            f"task.reward to FILE:{name}"
        ) from error
    return name


def _refuse_outer_values(name: str, function: RewardFunction, others: Sequence[str]) -> None:
    code = function.__code__
    outer = sorted({*code.co_freevars, *_globals_of(code)} - set(others) - set(dir(builtins)))
    if outer:
        raise ConfigError(
            f"reward: {name} uses {', '.join(outer)}, which the verifier's process does not have; "
            "import or define it in the function, or write all of it to a file and set task.reward"
        )


def _globals_of(code: CodeType) -> set[str]:
    """Returns the global names that a code object and the ones in it read."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _globals_of(constant)
    return names
