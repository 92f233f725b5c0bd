"""`bapo runs`, `pause`, `resume`, `stop` and `delete`: the runs of the service."""

from __future__ import annotations

import click

from services.buffer.api.wire import RunState
from services.cli.options import json_option, run_argument
from services.cli.service import connect
from services.cli.tables import show


@click.command
@json_option
def runs(as_json: bool) -> None:
    """List the runs of the service."""
    states = connect().runs()
    rows = [
        (state.name, state.status, f"{state.current_step}/{state.config.steps}", state.attempt)
        for state in states
    ]
    show(states, ["run", "status", "step", "attempt"], rows, as_json=as_json)


@click.command
@run_argument
def pause(run: str) -> None:
    """Let the processes of a run wait.

    They keep their memory; `bapo resume` ends the pause.
    """
    _print_status(connect(run).pause())


@click.command
@run_argument
def resume(run: str) -> None:
    """End the pause of a run."""
    _print_status(connect(run).resume())


@click.command
@run_argument
def stop(run: str) -> None:
    """Stop a run, so that its processes end.

    `bapo run --resume` continues it from its last checkpoint.
    """
    _print_status(connect(run).stop())


@click.command
@run_argument
def delete(run: str) -> None:
    """Delete a run and its objects for good."""
    connect(run).delete_run()
    click.echo(f"{run} is deleted, with its objects")


def _print_status(state: RunState) -> None:
    click.echo(f"{state.name} is {state.status} after step {state.current_step}")
