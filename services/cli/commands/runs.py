"""`bapo runs`, `pause`, `resume`, `stop` and `delete`: the runs of the service."""

from __future__ import annotations

import os
from pathlib import Path
from socket import gethostname

import click

from bapo_core.errors import BapoError
from services.buffer.api.wire import RunState
from services.cli.echo import echo
from services.cli.options import json_option, run_argument
from services.cli.service import connect
from services.cli.tables import show


@click.command
@json_option
def runs(as_json: bool) -> None:
    """List the runs of the service."""
    states = connect().runs()
    rows = [
        (
            state.name,
            state.status,
            f"{state.current_step}/{state.steps or '?'}",
            state.attempt,
            "; ".join(f"from {each.first_step}: {each.describe(5)}" for each in state.changes),
            state.forked_from.describe() if state.forked_from else "",
            state.stopped.describe() if state.stopped else "",
        )
        for state in states
    ]
    columns = ["run", "status", "step", "attempt", "changes", "fork of", "stopped by"]
    empty = "there is no run yet; `bapo run examples/countdown.yaml` starts one"
    show(states, columns, rows, as_json=as_json, empty=empty)


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
@click.option("--reason", metavar="TEXT", help="Why; its processes and `bapo runs` say so.")
def stop(run: str, reason: str | None) -> None:
    """Stop a run, so that its processes end.

    `bapo run --resume` continues it from its last checkpoint, and so does its pipeline when it is
    started again.
    """
    # No getpass.getuser: a container's user may have no name.
    user = os.environ.get("USER") or f"user {os.getuid()}"
    by = f"`bapo stop` of {user} on {gethostname()}"
    _print_status(connect(run).stop(by=by, reason=reason))


@click.command
@run_argument
@click.option("--yes", is_flag=True, help="Delete it without asking.")
def delete(run: str, yes: bool) -> None:
    """Delete a run and its objects for good.

    Its rollouts, batches and checkpoints are deleted; reports in `runs/` are files of yours, and
    stay.
    """
    client = connect(run)
    state = client.run_state()
    if not yes and not _confirm_deletion(state):
        raise BapoError(f"run {run!r} was not deleted; --yes deletes it without asking")
    client.delete_run()
    reports = Path("runs") / run
    kept = f"; {reports} stays" if reports.exists() else ""
    echo(f"{run} is deleted, with its objects{kept}")


def _confirm_deletion(state: RunState) -> bool:
    steps = f"{state.current_step} of {state.steps or '?'} steps"
    question = (
        f"Delete run {state.name} ({state.status}, {steps}), with its rollouts and checkpoints?"
    )
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C, or no input to answer with.
        echo(err=True)
        return False


def _print_status(state: RunState) -> None:
    echo(f"{state.name} is {state.status} after step {state.current_step}")
