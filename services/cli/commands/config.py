"""`bapo config`: shows, checks and describes configurations."""

from __future__ import annotations

import json

import click
import yaml

from bapo_core.config import json_schema
from services.cli.options import ConfigArguments, config_arguments


@click.group
def config() -> None:
    """Show, check or describe a configuration."""


@config.command
@config_arguments
def show(config: ConfigArguments) -> None:
    """Show every key of a configuration, with its preset applied.

    \b
    Example:
      bapo config show examples/countdown.yaml algorithm=grpo
    """
    values = config.load().model_dump(mode="json")
    click.echo(yaml.safe_dump(values, sort_keys=False), nl=False)


@config.command
@config_arguments
def check(config: ConfigArguments) -> None:
    """Validate a configuration and warn about slow settings.

    \b
    Example:
      bapo config check examples/countdown.yaml rollout.group_size=16
    """
    for warning in config.load().warnings():
        click.echo(f"note: {warning}")
    click.echo(f"{config.file or 'the default configuration'} is valid")


@config.command
def schema() -> None:
    """Print the JSON schema of configurations, for editors.

    \b
    Example:
      bapo config schema > bapo.schema.json
    """
    click.echo(json.dumps(json_schema(), indent=2))
