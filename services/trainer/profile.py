"""Traces some steps by operation and kernel, for a trace viewer."""

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

WARM_UP_STEPS = 1
"""Steps left out: the first one has costs that no other has."""
LOGGED_OPERATIONS = 12
"""Most expensive operations that the log shows."""


@contextmanager
def trace_steps(
    steps: int, store: ObjectStore, *, run: str, rank: int, scratch: Path
) -> Iterator[Callable[[int], None]]:
    """Traces `steps` steps after the first one; 0 traces none.

    Yields a function to call with the number of each step that is done. The trace is stored after
    the last of these steps, or at the end if there were fewer.
    """
    if not steps:
        yield lambda _: None
        return
    done = 0

    def store_trace(trace: profile) -> None:
        file = scratch / "trace.json.gz"
        trace.export_chrome_trace(str(file))
        data = file.read_bytes()
        file.unlink()
        name = f"until-step-{done}-rank-{rank}-{digest_of(data)}.json.gz"
        store.put(f"{layout.profiles(run)}/" + name, data)
        kind = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=kind, row_limit=LOGGED_OPERATIONS)
        log.info("a trace was stored; `bapo profile %s` fetches it\n%s", run, table)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    window = schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1)
    with profile(activities=activities, schedule=window, on_trace_ready=store_trace) as trace:

        def step_done(step: int) -> None:
            nonlocal done
            done = step
            trace.step()

        yield step_done
