"""Interface to whatever runs the trainer's job: Kubernetes, or processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from bapo_core.errors import BapoError
from pipelines.training_job import TrainingJob
from pipelines.waiting import WaitLog

Phase = Literal["waiting", "running", "restarting", "succeeded", "failed", "terminating"]
"""`terminating`: the job was deleted, but its object or its pods still exist."""
DELETE_TIMEOUT_S = 180.0
POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job as its backend sees it."""

    phase: Phase
    reason: str = ""
    """Why the job failed or what it waits for, and the remedy where one is known."""
    spec_hash: str = ""
    """The job's `TrainingJob.spec_hash`."""
    workflow: str | None = None
    """Workflow that the job belongs to, as `namespace/name`; None outside a cluster."""
    restarts: int = 0
    """Restarts of the job's pods, as far as the backend knows of them."""
    last_end: str = ""
    """How a pod that was restarted has ended last; empty before the first restart."""
    blocked: bool = False
    """Whether a pod has a node but its container cannot be created, for example because its image
    or a Secret is missing."""

    @property
    def finished(self) -> bool:
        return self.phase in ("succeeded", "failed")


class TrainerBackend(Protocol):
    """Creates, reads and deletes jobs by name.

    Every method is idempotent. All raise `BapoError` with the remedy in its message.
    """

    def create(self, job: TrainingJob) -> bool:
        """Creates a job; returns False if one of its name exists."""
        ...

    def state(self, name: str) -> JobState | None:
        """Returns the state of a job, or None if it does not exist."""
        ...

    def delete(self, name: str, workflow: str | None = None) -> None:
        """Deletes a job and stops its processes; does nothing if the job does not exist.

        workflow: delete the job only if it belongs to this workflow, or to none.
        """
        ...

    def jobs(self) -> dict[str, str]:
        """Returns the run of every job of the release, keyed by the job's name."""
        ...

    def is_queued(self, name: str) -> bool:
        """Whether Kueue manages the job, which has a local queue."""
        ...

    def abandoned(self, name: str) -> bool:
        """Whether the pipeline that created the job has finished or was deleted."""
        ...

    def has_ended(self, workflow: str) -> bool:
        """Whether the workflow (`namespace/name`) has finished or was deleted.

        Returns False for one of another namespace, about which the backend knows nothing.
        """
        ...


def ensure_job(
    backend: TrainerBackend, job: TrainingJob, *, log: Callable[[str], None]
) -> JobState | None:
    """Makes sure that the job exists and has not finished.

    A job with the same spec hash is adopted; its state is returned. One that has finished, or that
    was built from another spec, is replaced. log: gets what is waited for. Raises `BapoError`.
    """
    while not backend.create(job):
        state = backend.state(job.name)
        if (
            state is not None
            and state.spec_hash == job.spec_hash
            and not state.finished
            and state.phase != "terminating"
        ):
            return state
        remove_job(backend, job.name, log=log)
    return None


def remove_job(
    backend: TrainerBackend,
    name: str,
    workflow: str | None = None,
    *,
    log: Callable[[str], None],
) -> None:
    """Deletes the job and waits until it no longer exists.

    workflow: leave the job alone if it belongs to another workflow. log: gets what is waited for.

    Raises `BapoError` when it still exists after `DELETE_TIMEOUT_S`.
    """
    deadline = time.monotonic() + DELETE_TIMEOUT_S
    lines = WaitLog(log)
    backend.delete(name, workflow)
    while (state := backend.state(name)) is not None:
        if workflow is not None and state.workflow not in (None, workflow):
            return
        if time.monotonic() > deadline:
            raise BapoError(
                f"job {name} was deleted but still exists after {DELETE_TIMEOUT_S:.0f} s; "
                f"{state.reason} (a finalizer, a node that does not answer)"
            )
        reason = f": {state.reason}" if state.reason else ""
        lines.say(f"waiting until job {name}, which is {state.phase}, is deleted{reason}")
        time.sleep(POLL_INTERVAL_S)
