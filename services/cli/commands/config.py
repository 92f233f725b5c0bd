"""`bapo config`: shows, checks, describes and stores configurations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from bapo_core.config import json_schema
from services.cli.echo import echo
from services.cli.options import ConfigArguments, config_arguments, json_option

if TYPE_CHECKING:
    from bapo_core.config import RunConfig
    from services.datasets.dataset import Dataset


@click.group
def config() -> None:
    """Show, check, describe or store a configuration."""


@config.command
@config_arguments
def show(config: ConfigArguments) -> None:
    """Show every key of a configuration, with its preset applied.

    \b
    Example:
      bapo config show examples/countdown.yaml algorithm=grpo
    """
    values = config.load().model_dump(mode="json")
    echo(yaml.safe_dump(values, sort_keys=False), nl=False)


@config.command
@config_arguments
@click.option(
    "--data",
    is_flag=True,
    help="Read model and data too, as at the start of a run: columns, reference answers, lengths.",
)
def check(config: ConfigArguments, data: bool) -> None:
    """Validate a configuration with its task and data rules, and warn about slow settings.

    \b
    Examples:
      bapo config check examples/countdown.yaml rollout.group_size=16
      bapo config check examples/gsm8k.yaml --data
    """
    from bapo_core.selection import check_selection

    settings = config.load()
    check_selection(settings)
    for warning in settings.warnings():
        echo(f"note: {warning}")
    name = config.file or "the default configuration"
    if not data:
        echo(f"{name} is valid; data and model are read when a run starts, or with --data")
        return
    for dataset in _read_data(settings):
        echo(f"{dataset.name}: {dataset.summary}")
    echo(f"{name}, its model and its data are valid")


def _read_data(settings: RunConfig) -> Iterable[Dataset]:
    """Returns the data sets of a run, checked as at its start."""
    from services.cli.service import data_sources, open_local_object_store
    from services.datasets.prepare import load_prompts
    from services.model.resolve import ensure_model
    from services.stack.settings import default_home

    model = ensure_model(settings, default_home(), open_store=open_local_object_store)
    return load_prompts(settings, model, data_sources()).all


@config.command
@click.argument(
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A YAML file (see examples/).",
)
@click.option("--name", metavar="NAME", help="Name to store it by; by default, its own.")
def push(file: Path, name: str | None) -> None:
    """Store a configuration in the buffer service, for pipelines.

    Kubeflow's form then takes the name as `stored_config`. A configuration that was stored by this
    name before is replaced; runs keep the configuration that they were created with.

    \b
    Example:
      bapo config push examples/countdown-vllm.yaml --name mine
    """
    from bapo_core.config import load_config
    from services.cli.service import connect

    name = name or load_config(file).name
    stored = connect().store_config(name, file.read_text(encoding="utf-8"))
    echo(f"stored as {stored.name}; start a pipeline with stored_config={stored.name}")


@config.command
@json_option
def stored(as_json: bool) -> None:
    """List the configurations that `bapo config push` stored."""
    from services.cli.service import connect
    from services.cli.tables import show

    configs = connect().configs()
    rows = [(config.name, f"{config.stored_at:%Y-%m-%d %H:%M}") for config in configs]
    empty = "no configuration is stored yet; `bapo config push FILE` stores one"
    show(configs, ["name", "stored"], rows, as_json=as_json, empty=empty)


@config.command
def schema() -> None:
    """Print the JSON schema of configurations, for editors.

    \b
    Example:
      bapo config schema > bapo.schema.json
    """
    echo(json.dumps(json_schema(), indent=2))
