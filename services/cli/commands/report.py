"""`bapo report`: the report of a run."""

from __future__ import annotations

from pathlib import Path

import click

from services.cli.echo import echo
from services.cli.local_run import write_outputs
from services.cli.options import run_argument
from services.cli.service import client_of, connect_to_named
from services.stack.settings import default_home
from services.stack.stack import find_or_start_stack


@click.command
@run_argument
def report(run: str) -> None:
    """Write the report of a run again.

    Writes `runs/RUN/report.html` and `summary.json`, also while the run is training.

    \b
    Example:
      bapo report countdown
    """
    from services.report.summary import read_history

    client = connect_to_named(run)
    if client is not None:
        history = read_history(client)
    else:
        with find_or_start_stack(default_home(), 0) as stack:
            history = read_history(client_of(stack, run))
    directory = Path("runs") / run
    write_outputs(directory, history)
    echo(directory / "report.html")
