"""Where the time of some steps goes, by operation and kernel, for a trace viewer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from services.common import layout
from services.common.objectstore import ObjectStore, digest_of

log = logging.getLogger(__name__)

WARM_UP = 1
"""Steps before: the first one has costs that no other has."""
SHOWN = 12


@contextmanager
def profiled(
    steps: int, store: ObjectStore, *, run: str, rank: int, scratch: Path
) -> Iterator[Callable[[int], None]]:
    """Traces `steps` steps after the next one; call what it gives with each step that is done.

    The trace is in the object store after the last of them, or after as many as there were.
    """
    if not steps:
        yield lambda _: None
        return
    done = 0

    def keep(found: profile) -> None:
        file = scratch / "trace.json.gz"
        found.export_chrome_trace(str(file))
        data = file.read_bytes()
        file.unlink()
        name = f"until-step-{done}-rank-{rank}-{digest_of(data)}.json.gz"
        store.put(f"{layout.profiles(run)}/" + name, data)
        kind = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=kind, row_limit=SHOWN)
        log.info("a trace is in the object store (`bapo profile %s`)\n%s", run, table)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    when = schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
    with profile(activities=activities, schedule=when, on_trace_ready=keep) as found:

        def step_done(step: int) -> None:
            nonlocal done
            done = step
            found.step()

        yield step_done
