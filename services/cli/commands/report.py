"""`bapo report`: the report of a run."""

from __future__ import annotations

from pathlib import Path

import click

from services.buffer.api.client import BufferClient
from services.cli.console import plain_console
from services.cli.local_run import LocalRun, write_outputs
from services.cli.options import run_argument
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

    home = default_home()
    with find_or_start_stack(home, 0) as endpoints:
        history = read_history(BufferClient(endpoints.buffer_url, endpoints.token, run=run))
    config = history.config
    directory = Path("runs") / run
    write_outputs(LocalRun(config, endpoints, home, directory, plain_console()), history)
    click.echo(directory / "report.html")
