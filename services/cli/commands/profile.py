"""`bapo profile`: the trainer's traces of a run, for a trace viewer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import BaseModel

from bapo_core.errors import BapoError
from services.cli.echo import echo
from services.cli.options import json_option, run_argument
from services.cli.service import connect, open_object_store
from services.cli.tables import show
from services.common import layout
from services.common.objectstore import ObjectStore

_TRACE = re.compile(r".*/until-step-(?P<step>\d+)-rank-(?P<rank>\d+)-(?P<digest>\w{64})\.json\.gz")


class Trace(BaseModel):
    """A trace of one rank of the trainer, in the object store."""

    step: int
    """Last step in the trace."""
    rank: int
    key: str
    digest: str


@click.command
@run_argument
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Write the traces there; https://ui.perfetto.dev opens them.",
)
@json_option
def profile(run: str, export: Path | None, as_json: bool) -> None:
    """List or export the trainer's traces.

    `bapo run --profile STEPS` makes them.

    \b
    Example:
      bapo profile countdown --export traces/
    """
    name = connect(run).run_state().name
    store = open_object_store()
    traces = _find_traces(store, name)
    missing = f"run {name!r} has no trace; `bapo run ... --profile 3` makes one"
    if export is None:
        rows = [(trace.step, trace.rank, trace.key) for trace in traces]
        show(traces, ["until step", "rank", "object"], rows, as_json=as_json, empty=missing)
        return
    if not traces:
        raise BapoError(missing)
    export.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        target = export / f"{name}-until-step-{trace.step}-rank-{trace.rank}.json.gz"
        target.write_bytes(store.get(trace.key, trace.digest))
        echo(target)


def _find_traces(store: ObjectStore, run: str) -> Sequence[Trace]:
    matches = [(key, _TRACE.fullmatch(key)) for key in store.keys(f"{layout.profiles(run)}/")]
    traces = [
        Trace.model_validate({**match.groupdict(), "key": key}) for key, match in matches if match
    ]
    return sorted(traces, key=lambda trace: (trace.step, trace.rank))
