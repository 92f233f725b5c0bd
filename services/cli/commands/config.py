"""`bapo config`: shows, checks, describes and stores configurations."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

TRIED_WITHIN_S = 30.0
"""Seconds for which reward functions are tried on the rows of the training data."""


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
        for line in _try_reward(settings, _read_first_rows(settings)):
            echo(line)
        echo(f"{name} is valid; data and model are read when a run starts, or with --data")
        return
    datasets = _read_data(settings)
    for dataset in datasets:
        echo(f"{dataset.name}: {dataset.summary}")
    for line in _try_reward(settings, datasets):
        echo(line)
    echo(f"{name}, its model and its data are valid")


def _read_data(settings: RunConfig) -> Sequence[Dataset]:
    """Returns the data sets of a run, checked as at its start; the training prompts come first."""
    from services.cli.service import data_sources, open_local_object_store
    from services.datasets.prepare import load_prompts
    from services.model.resolve import ensure_model
    from services.stack.settings import default_home

    model = ensure_model(settings, default_home(), open_store=open_local_object_store)
    return load_prompts(settings, model, data_sources()).all


def _read_first_rows(settings: RunConfig) -> Sequence[Dataset]:
    """Returns the first rows for a reward function, if they are in a file of this machine."""
    task = settings.task
    if task.functions is None or task.train_path is None:
        return []
    from bapo_core.tasks import get_task
    from services.datasets import DataSources, is_local, read_dataset
    from services.verifier.api.trial import TRIED_ROWS

    if not is_local(task.train_path):
        return []
    built = get_task(task.name, **task.arguments)
    return [read_dataset(built, task.train_path, DataSources(), task.columns, TRIED_ROWS)]


def _try_reward(settings: RunConfig, datasets: Sequence[Dataset]) -> list[str]:
    """Tries the reward functions on rows of the training data, in a confined process.

    Returns lines for a person; none without reward functions. Raises `BapoError`.
    """
    functions = settings.task.functions
    if functions is None:
        return []
    from services.cli.reward_files import read_reward_file
    from services.datasets import check_reward_columns
    from services.verifier.api.trial import MOST_TRIED_ROWS, try_functions
    from services.verifier.pool import VerifierPool

    text = read_reward_file(functions)
    if not datasets:
        return [f"{functions.file} has the functions {', '.join(functions.names)}"]
    check_reward_columns(functions, text, datasets)
    pool = VerifierPool(workers=1, deadline_s=5.0)
    try:
        rows = [prompt.payload for prompt in datasets[0].prompts]
        tried = try_functions(
            functions,
            text,
            rows,
            pool.verify_items,
            count=MOST_TRIED_ROWS,
            every=max(1, -(-len(rows) // MOST_TRIED_ROWS)),
            within_s=TRIED_WITHIN_S,
        )
    finally:
        pool.close()
    names = ", ".join(functions.names)
    return [f"{functions.file}: {names} gave rewards to the {tried} rows that were tried"]


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
    name before is replaced; runs keep the configuration that they were created with. The file of
    `task.reward` is stored, too.

    \b
    Example:
      bapo config push examples/countdown-vllm.yaml --name mine
    """
    from bapo_core.config import load_config
    from services.cli.reward_files import pin_in_text, pin_reward, store_reward
    from services.cli.service import connect

    config = load_config(file)
    pinned = pin_reward(config)
    text = pin_in_text(file.read_text(encoding="utf-8"), config, pinned)
    client = connect()
    store_reward(pinned, client)
    stored = client.store_config(name or config.name, text)
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
