"""What the pipeline wants of whoever runs the trainer's job, whatever that is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bapo_core.errors import BapoError
from pipelines.pytorchjob import MADE_FROM_LABEL

Phase = Literal["waiting", "running", "restarting", "succeeded", "failed", "ending"]
"""ending: deleted, and not yet gone."""
GONE_WITHIN_S = 180.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job is, as its backend sees it."""

    phase: Phase
    reason: str = ""
    """Why it failed, or what it waits for; what to do about it, where that is known."""
    spec_hash: str = ""
    """The job's label of that name."""

    @property
    def over(self) -> bool:
        return self.phase in ("succeeded", "failed")


class TrainerBackend(Protocol):
    """Jobs by name. Every call may be repeated; errors are `BapoError`s that say what to do."""

    def create(self, job: dict[str, Any]) -> bool:
        """Creates a job from its manifest; False if one of its name is there."""
        ...

    def state(self, name: str) -> JobState | None:
        """None if there is no such job."""
        ...

    def delete(self, name: str) -> None:
        """Ends the job and what it started; nothing if there is none."""
        ...

    def jobs(self) -> dict[str, str]:
        """The runs of all jobs of the release, by the job's name."""
        ...

    def abandoned(self, name: str) -> bool:
        """Whether the pipeline that began the job is over, or gone."""
        ...


def ensure(backend: TrainerBackend, job: dict[str, Any]) -> None:
    """The job is there and not over. One that was made from the same is taken over; one that is
    over, or was made from something else, is replaced."""
    name = job["metadata"]["name"]
    while not backend.create(job):
        state = backend.state(name)
        same = state is not None and state.spec_hash == job["metadata"]["labels"][MADE_FROM_LABEL]
        if state is not None and same and not state.over and state.phase != "ending":
            return
        remove(backend, name)


def remove(backend: TrainerBackend, name: str) -> None:
    """Deletes the job and returns when it is gone."""
    deadline = time.monotonic() + GONE_WITHIN_S
    backend.delete(name)
    while backend.state(name) is not None:
        if time.monotonic() > deadline:
            raise BapoError(
                f"job {name} was deleted but is still there after {GONE_WITHIN_S:.0f} s; look at "
                f"`kubectl describe pytorchjob {name}` for what holds it (a finalizer, a node that "
                "does not answer)"
            )
        time.sleep(LOOK_EVERY_S)
