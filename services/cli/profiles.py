"""`bapo profile`: the trainer's traces of a run, for a trace viewer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from pydantic import BaseModel

from bapo_core.errors import BapoError
from services.cli.checkpoints import object_store
from services.cli.inspect import service, show
from services.common import layout
from services.common.objectstore import ObjectStore

_TRACE = re.compile(r".*/until-step-(?P<step>\d+)-rank-(?P<rank>\d+)-(?P<digest>\w{64})\.json\.gz")


class Trace(BaseModel):
    step: int
    """The last one in it."""
    rank: int
    key: str
    digest: str


def profiles(arguments: argparse.Namespace) -> None:
    """Lists or exports."""
    run = service(arguments.run).run_state().name
    store = object_store()
    traces = _traces(store, run)
    if arguments.export is None:
        rows = [(each.step, each.rank, each.key) for each in traces]
        show(arguments, traces, ["until step", "rank", "object"], rows)
        return
    if not traces:
        raise BapoError(f"run {run!r} has no trace; `bapo run ... --profile 3` makes one")
    arguments.export.mkdir(parents=True, exist_ok=True)
    for each in traces:
        target = arguments.export / f"{run}-until-step-{each.step}-rank-{each.rank}.json.gz"
        target.write_bytes(store.get(each.key, each.digest))
        print(target)


def _traces(store: ObjectStore, run: str) -> Sequence[Trace]:
    found = [(key, _TRACE.fullmatch(key)) for key in store.keys(f"{layout.profiles(run)}/")]
    traces = [
        Trace.model_validate({**match.groupdict(), "key": key}) for key, match in found if match
    ]
    return sorted(traces, key=lambda trace: (trace.step, trace.rank))
