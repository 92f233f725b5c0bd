"""Scales the rollout replicas to zero while the release works for no run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import OPEN_STATUSES

POLL_INTERVAL_S = 5.0
Workload = tuple[str, str, str]
"""API group, version and plural of a kind of workload."""
STATEFUL_SETS: Workload = ("apps", "v1", "statefulsets")
LEADER_WORKER_SETS: Workload = ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets")


class Scales(Protocol):
    """The part of the Kubernetes API that the scaler calls."""

    def replicas(self, kind: Workload, name: str) -> int:
        """Returns the number of replicas that a workload should have."""
        ...

    def scale(self, kind: Workload, name: str, replicas: int) -> None:
        """Sets the number of replicas that a workload should have."""
        ...


class RolloutScaler:
    """Gives a workload all of its replicas for a run, and none after `idle_s` without one.

    A run counts from the moment at which it asks for its turn until it has ended.
    """

    def __init__(
        self,
        buffer: BufferClient,
        cluster: Scales,
        kind: Workload,
        name: str,
        replicas: int,
        idle_s: float,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer, self._cluster, self._kind, self._name = buffer, cluster, kind, name
        self._replicas, self._idle_s, self._log, self._clock = replicas, idle_s, log, clock
        self._needed_at = clock()
        """When a run needed the replicas last, or the scaler started."""

    def step(self) -> None:
        """Compares what is needed with what there is, and scales. Raises `BapoError`."""
        open_runs = [run.name for run in self._buffer.runs() if run.status in OPEN_STATUSES]
        now = self._clock()
        if open_runs:
            self._needed_at = now
        elif now - self._needed_at < self._idle_s:
            return
        desired = self._replicas if open_runs else 0
        if self._cluster.replicas(self._kind, self._name) != desired:
            self._cluster.scale(self._kind, self._name, desired)
            reason = f"for run {open_runs[0]}" if open_runs else "because no run needs them"
            self._log(f"{self._name} is scaled to {desired} replicas, {reason}")

    def run(self) -> None:
        """Repeats `step` for ever; what fails is logged and tried again."""
        while True:
            try:
                self.step()
            except BapoError as error:
                self._log(f"nothing is scaled: {error}")
            time.sleep(POLL_INTERVAL_S)
