"""Generates the reference of every command."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from services.cli.main import SECTIONS, bapo

_EXAMPLES = "\b\n"
"""Marks a paragraph that click does not wrap; all of them are examples."""

HEADER = """# Command line

Every command of `bapo`; `bapo COMMAND --help` shows the same in the terminal. A configuration is
given as a YAML file, which may be left out, and any number of `key=value`, which may stand anywhere
and win over the file.

An error is one line on standard error, and the exit code is 1. Wrong usage exits with 2, an
interruption with 130. `eval "$(_BAPO_COMPLETE=bash_source bapo)"` completes commands and options in
bash (`zsh_source` and `fish_source` in other shells). The environment variables are in
[environment.md](environment.md). This page is generated (`make docs`).
"""


def render() -> str:
    """Returns the page."""
    context = click.Context(bapo, info_name="bapo")
    lines = [HEADER]
    for heading, section in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for name in section:
            command = bapo.get_command(context, name)
            assert command is not None
            lines += _describe(command, f"bapo {name}")
    return "\n".join(lines).rstrip() + "\n"


def _describe(command: click.Command, path: str, level: str = "###") -> Iterator[str]:
    """Yields the lines of a command, and of the commands of a group."""
    paragraphs = cleandoc(command.help or "").split("\n\n")
    yield from (f"{level} {path}", "")
    for paragraph in paragraphs:
        if not paragraph.startswith(_EXAMPLES):
            yield from (paragraph, "")
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            yield from _describe(subcommand, f"{path} {name}", f"{level}#")
        return
    usage = [path, *(_usage(parameter) for parameter in command.params)]
    yield from ("```", " ".join(usage), "```", "")
    if command.params:
        yield from ("| | |", "| --- | --- |", *map(_row, command.params), "")
    for paragraph in paragraphs:
        if paragraph.startswith(_EXAMPLES):
            title, *examples = paragraph.removeprefix(_EXAMPLES).splitlines()
            yield from (title, "", "```", *(line.strip() for line in examples), "```", "")


def _usage(parameter: click.Parameter) -> str:
    return f"[{_names(parameter)}]" if isinstance(parameter, click.Option) else _names(parameter)


def _names(parameter: click.Parameter) -> str:
    """Returns an argument's metavar, or an option with the metavar of its value."""
    if isinstance(parameter, click.Argument):
        return parameter.metavar or parameter.human_readable_name
    assert isinstance(parameter, click.Option)
    if parameter.is_flag:
        return parameter.opts[0]
    value = parameter.metavar or parameter.human_readable_name.upper().replace("-", "_")
    return f"{parameter.opts[0]} {value}"


def _row(parameter: click.Parameter) -> str:
    """Returns a row of the table of parameters: its name, its meaning and its default."""
    assert isinstance(parameter, click.Argument | click.Option)
    cell = parameter.help or ""
    if isinstance(parameter.type, click.Choice):
        cell += f" One of {', '.join(f'`{choice}`' for choice in parameter.type.choices)}."
    flag = isinstance(parameter, click.Option) and parameter.is_flag
    # Click marks the absence of a default by an object of its own.
    if not flag and isinstance(parameter.default, str | int | Path):
        cell += f" Default: `{parameter.default}`."
    return f"| `{_names(parameter)}` | {cell} |"
