"""A group of commands whose modules are imported when a command is used.

`bapo --help` must not wait for the imports of every command, so names, summaries and the places of
the commands stand in a table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command that is not imported yet."""

    target: str
    """`module:object`, where the object is a `click.Command`."""
    summary: str
    """One sentence for the list of commands; the first sentence of the command's own help."""


class LazyGroup(click.Group):
    """Lists its commands from a table, under headings, and imports a command to run it."""

    def __init__(
        self, *arguments: Any, sections: Mapping[str, Mapping[str, Lazy]], **options: Any
    ) -> None:
        """sections: heading -> name of a command -> where it is."""
        super().__init__(*arguments, **options)
        self.sections = sections
        self._places = {
            name: place for section in sections.values() for name, place in section.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        place = self._places.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.target.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command), place.target
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            # Click suggests similar names from the commands that it has imported.
            raise click.NoSuchCommand(
                error.command_name, possibilities=self._places, ctx=ctx
            ) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for heading, section in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, place.summary) for name, place in section.items()])
