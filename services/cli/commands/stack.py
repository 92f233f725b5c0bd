"""`bapo stack`: the services of this machine."""

from __future__ import annotations

import sys

import click

from services.cli.echo import echo
from services.cli.options import port_option
from services.cli.service import format_addresses
from services.stack.settings import default_home
from services.stack.stack import stack_down, stack_up


@click.group
def stack() -> None:
    """Start or stop the services of this machine.

    They are Postgres, an object store, the buffer service with the REST API and the dashboard, and
    the verifier. Their data is in `BAPO_HOME`, which is `.bapo` unless set.
    """


@stack.command
@port_option
def up(port: int) -> None:
    """Start the services, which run until `bapo stack down`."""
    home = default_home()
    endpoints = stack_up(home, port)
    echo(format_addresses(endpoints, home, with_token=sys.stdout.isatty()))
    if port and not endpoints.buffer_url.endswith(f":{port}"):
        echo(f"note: it ran already; for port {port}, run `bapo stack down` first")


@stack.command
@click.option("--force", is_flag=True, help="Stop them while runs use them, which fail then.")
def down(force: bool) -> None:
    """Stop the services; their data stays."""
    stopped = stack_down(default_home(), force=force)
    echo("stopped" if stopped else "no stack is running")
