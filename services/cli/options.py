"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from services.stack import DEFAULT_PORT

if TYPE_CHECKING:
    from bapo_core.config import RunConfig


@dataclass(frozen=True, slots=True)
class ConfigArguments:
    """A configuration file and the keys that are changed, as given on the command line."""

    file: str | None
    overrides: tuple[str, ...]
    """`key=value`, in the order given."""

    def load(self, *overrides: str) -> RunConfig:
        """Returns the configuration, with further overrides. Raises `ConfigError`."""
        from bapo_core.config import load_config

        return load_config(self.file, [*self.overrides, *overrides])


def split_config_arguments(arguments: Sequence[str]) -> ConfigArguments:
    """Takes the first argument for the file, unless it is a `key=value`."""
    if arguments and "=" not in arguments[0]:
        return ConfigArguments(arguments[0], tuple(arguments[1:]))
    return ConfigArguments(None, tuple(arguments))


def _split(_context: click.Context, _parameter: click.Parameter, value: Any) -> ConfigArguments:
    return split_config_arguments(value)


config_arguments = click.argument(
    "config",
    nargs=-1,
    type=click.Path(),
    metavar="[FILE] [KEY=VALUE]...",
    callback=_split,
    help="A YAML file (see examples/; the defaults apply without one), and keys of the "
    "configuration to change, for example sync.every=1.",
)
pipeline_arguments = click.argument(
    "config",
    nargs=-1,
    type=click.Path(),
    metavar="[FILE] [PARAMETER=VALUE]...",
    callback=_split,
    help="A YAML file (see examples/), parameters of the pipeline, for example "
    "workers=2, and keys of the configuration, for example name=mine rollout.group_size=16.",
)
run_argument = click.argument("run", help="Name of the run.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
limit_option = click.option(
    "--limit", type=click.IntRange(min=0), default=50, metavar="ROWS", help="Most rows to show."
)


def refuse_options(*names: str, why: str) -> None:
    """Raises `click.UsageError` for an option on the command line that has no effect there."""
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.opts[0] in names:
            raise click.UsageError(f"{option.opts[0]} has no effect here: {why}; leave it out.")


jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Runs that are trained at a time. A small model leaves part of two cores idle.",
)
port_option = click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=DEFAULT_PORT,
    metavar="PORT",
    help="Port of the REST API; 0 takes any free one.",
)
