"""`bapo dataset`: stores data sets in the buffer service, and lists them."""

from __future__ import annotations

import click

from services.cli.echo import echo
from services.cli.options import json_option


@click.group
def dataset() -> None:
    """Store data sets in the buffer service, and list them."""


_ADDRESS_HELP = (
    "A Parquet, JSONL or JSON file, hf://organisation/name[@revision][:split] or s3://bucket/key."
)
_task_option = click.option(
    "--task", "task_name", required=True, metavar="TASK", help="Task of the problems."
)
_column_option = click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="COLUMN=THEIRS",
    help="A column of the task, and its name in the data; repeat it for more.",
)


@dataset.command
@click.argument("address", help=_ADDRESS_HELP)
@_task_option
@_column_option
def check(address: str, task_name: str, columns: tuple[str, ...]) -> None:
    """List the rows of a data set whose reference answers the task cannot read.

    Such a reference answer equals only its own characters, so that right answers are refused. Every
    row is checked as for an upload, and nothing is stored. Ends with exit code 1 if there are such
    rows.

    \b
    Examples:
      bapo dataset check problems.jsonl --task math
      bapo dataset check hf://math-ai/minervamath:test --task math --column problem=question
    """
    from bapo_core.tasks import get_task
    from services.cli.service import data_sources
    from services.datasets import pin_address, read_dataset

    source = pin_address(address)
    found = read_dataset(get_task(task_name), source, data_sources(), _parse_columns(columns))
    for number, reason in found.unreadable:
        echo(f"row {number}: {reason}")
    echo(
        f"{len(found.unreadable)} of {len(found.prompts)} reference answers cannot be read by the "
        f"task {task_name}"
    )
    if found.unreadable:
        click.get_current_context().exit(1)


@dataset.command
@click.argument("address", help=_ADDRESS_HELP)
@_task_option
@click.option(
    "--name", metavar="NAME", help="Name to store it by; by default, the task and a digest."
)
@_column_option
def upload(address: str, task_name: str, name: str | None, columns: tuple[str, ...]) -> None:
    """Store a data set in the buffer service, for runs.

    A configuration then takes it as `task.train_path` or `task.test_path`: `dataset:NAME`. Every
    row is checked first. To repeat an upload changes nothing, and completes one that was
    interrupted; other prompts under the same name are refused.

    \b
    Examples:
      bapo dataset upload problems.jsonl --task math --name mine
      bapo dataset upload hf://math-ai/minervamath:test --task math --column problem=question
    """
    from bapo_core.tasks import get_task
    from services.cli.service import connect, data_sources
    from services.datasets import digest_of_prompts, pin_address, read_dataset, store_dataset

    task, source = get_task(task_name), pin_address(address)
    client = connect()
    stored = read_dataset(task, source, data_sources(), _parse_columns(columns))
    name = name or stored.name
    digest = digest_of_prompts(stored.prompts)
    store_dataset(client, stored, name=name, digest=digest, source=source)
    echo(f"dataset {name}: {stored.summary}")
    echo(f"use it as task.train_path=dataset:{name}")


def _parse_columns(columns: tuple[str, ...]) -> dict[str, str]:
    parsed = {}
    for column in columns:
        ours, separator, theirs = column.partition("=")
        if not separator or not ours or not theirs:
            raise click.BadParameter(
                f"{column!r}: write COLUMN=THEIRS, for example problem=question",
                param_hint="--column",
            )
        parsed[ours] = theirs
    return parsed


@dataset.command("list")
@json_option
def list_stored(as_json: bool) -> None:
    """List the data sets of the buffer service, those of runs included.

    \b
    Example:
      bapo dataset list
    """
    from services.cli.service import connect
    from services.cli.tables import show

    datasets = connect().datasets()
    rows = [
        (
            stored.dataset,
            stored.task or "-",
            stored.prompts,
            (stored.digest or "-")[:12],
            stored.source or "-",
        )
        for stored in datasets
    ]
    columns = ["dataset", "task", "prompts", "digest", "source"]
    show(datasets, columns, rows, as_json=as_json, empty="no data set is stored yet")
