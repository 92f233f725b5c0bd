"""`bapo dataset`: stores data sets in the buffer service, and lists them."""

from __future__ import annotations

import click

from services.cli.options import json_option


@click.group
def dataset() -> None:
    """Store data sets in the buffer service, and list them."""


@dataset.command
@click.argument(
    "address",
    help="A Parquet, JSONL or JSON file, hf://organisation/name[@revision][:split] or "
    "s3://bucket/key.",
)
@click.option("--task", "task_name", required=True, metavar="TASK", help="Task of the problems.")
@click.option(
    "--name", metavar="NAME", help="Name to store it by; by default, the task and a digest."
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="COLUMN=THEIRS",
    help="A column of the task, and its name in the data; repeat it for more.",
)
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
    click.echo(f"dataset {name}: {stored.summary}")
    click.echo(f"use it as task.train_path=dataset:{name}")


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
