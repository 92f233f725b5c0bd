"""Generates the page of environment variables.

Variables, defaults and meanings come from the settings classes of `services` and `pipelines`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.common.settings import Settings, variables

MODULES = (
    "services.cli.settings",
    "services.stack.settings",
    "services.buffer.settings",
    "services.verifier.settings",
    "services.rollout.settings",
    "services.trainer.settings",
    "pipelines.settings",
)
"""The modules with settings classes, in the order of the page."""

HEADER = """# Environment variables

`bapo run` and the chart set the variables of the processes that they start. Set them yourself to
start a process by hand, and to point `bapo` at services of another machine. Every process reports
all variables that are missing or invalid in one error. An empty variable counts as one that is not
set. This page is generated (`make docs`).
"""
OTHERS = {
    "HF_TOKEN": "Token of the Hugging Face hub, for `hf://` models and data sets that are gated or "
    "private.",
    "HF_ENDPOINT": "Address of a mirror of the Hugging Face hub.",
    "CXX": "C++ compiler for vLLM on CPUs, `g++` unless set; without one, vLLM runs without "
    "`torch.compile`.",
    "RANK, LOCAL_RANK, WORLD_SIZE, PET_*": "Rank of a trainer process and its rendezvous, set by "
    "torchrun and the training operator.",
}
"""Variables that other programs define and our processes read."""


def render() -> str:
    """Returns the page."""
    lines = [HEADER]
    for settings in settings_classes():
        lines += _section(settings)
    lines += _table("Variables of other programs", OTHERS)
    return "\n".join(lines).rstrip() + "\n"


def settings_classes() -> Iterator[type[Settings]]:
    """Yields the settings class of every process."""
    for name in MODULES:
        module = importlib.import_module(name)
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Settings) and member.__module__ == name:
                yield member


def _section(settings: type[Settings]) -> Iterator[str]:
    title, *details = inspect.cleandoc(settings.__doc__ or "").split("\n\n")
    title = " ".join(title.split()).removeprefix("Settings of ").removesuffix(".")
    yield from (f"## {title[0].upper()}{title[1:]}", "")
    for paragraph in details:
        yield from (paragraph, "")
    rows = [_row(name, field) for name, field in variables(settings)]
    yield from ("| variable | default | meaning |", "| --- | --- | --- |", *rows, "")


def _table(title: str, meanings: Mapping[str, str]) -> Iterator[str]:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in meanings.items()]
    yield from (f"## {title}", "", "| variable | meaning |", "| --- | --- |", *rows, "")


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    """Returns the default; one that depends on the machine is explained in the meaning."""
    if field.default_factory is not None:
        return ""
    default: Any = field.default
    if default is PydanticUndefined:
        return "required"
    return "" if default is None or default == "" else f"`{default}`"
