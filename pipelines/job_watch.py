"""Follows a training job until a step is trained, and says why one does not train."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bapo_core.errors import BapoError
from pipelines.backends import JobState, TrainerBackend, ensure_job
from pipelines.training_job import TrainingJob
from pipelines.waiting import WaitLog
from services.buffer.api import wire
from services.buffer.api.client import BufferClient

POLL_INTERVAL_S = 2.0
MAX_RESTARTS = 4
"""Restarts without a committed step after which a job counts as failed. Nodes that are drained one
after another restart a job a few times; a trainer that runs out of memory does it for ever."""
MAX_CREATIONS = 4
"""Times that one step of the pipeline creates a job that is deleted."""
BLOCKED_WITHIN_S = 300.0
"""Seconds after which a container that cannot be created fails the job: the kubelet has tried it
again about eight times by then, and a missing Secret or image needs a person."""
STALLED_WITHIN_S = 6 * 3600.0
"""Seconds for which a job may run without a committed step. Steps with responses of 32,000 tokens,
and the evaluation of the initial weights before the first step, take an hour or two."""
REMEDIES = {
    "OOMKilled": "raise memory_per_worker, which is {memory}",
    "exited with 137": "it was killed, probably for its memory: raise memory_per_worker, which is "
    "{memory}",
    "exitCode: 137": "it was killed, probably for its memory: raise memory_per_worker, which is "
    "{memory}",
    "CreateContainerConfigError": "create what it names in the namespace {namespace}, or correct "
    "the chart's values (token, s3, trainer.extraEnv), which name it",
    "ImagePull": "image.registry, image.trainer and image.pullSecrets of the chart name the image "
    "{image} and the Secret to pull it with",
    "ImageNeverPull": "the node does not have the image {image}: load it, or let "
    "image.registry and image.pullPolicy of the chart fetch it",
    "InvalidImageName": "image.registry and image.trainer of the chart make the name {image}",
    "exceeded quota": "raise the ResourceQuota of the namespace {namespace}, or lower "
    "gpus_per_worker, cpu_per_worker or memory_per_worker",
    "Insufficient": "add nodes, free some, or lower gpus_per_worker, cpu_per_worker or "
    "memory_per_worker",
    "has no node": "see nodeSelector and tolerations of the chart's trainer, or lower "
    "gpus_per_worker, cpu_per_worker or memory_per_worker",
}
"""What a person changes, by a part of the reason that Kubernetes gives."""


@dataclass
class JobWatch:
    """Follows the job of a run, for one step of the pipeline.

    It creates the job again when it was deleted, because Kubeflow does not repeat a step that
    fails.
    """

    backend: TrainerBackend
    job: TrainingJob
    buffer: BufferClient
    log: Callable[[str], None]
    start_within_s: float
    """Seconds that the job may wait for its nodes without a committed step."""
    check_run: Callable[[], wire.RunState]
    """Returns the run's state; raises `BapoError` once the run is no longer this pipeline's."""
    describe_rollouts: Callable[[], str]
    """Returns what the replicas do, without whose rollouts a job that runs trains nothing."""

    _step: int = 0
    _restarts: int | None = 0
    """Restarts before the last committed step; None until the state of an adopted job is read,
    whose restarts may be those of steps that were committed before."""
    _waited_s: float = 0.0
    """Seconds without nodes since the last committed step. A restart does not set it back."""
    _blocked_s: float = 0.0
    _stalled_s: float = 0.0
    """Seconds for which the job has run since the last committed step, without pauses."""
    _creations: int = 1
    _at: float = field(default_factory=time.monotonic)
    _lines: WaitLog = field(init=False)

    def __post_init__(self) -> None:
        self._lines = WaitLog(self.log)

    def ensure_job(self) -> None:
        """Creates the job, or adopts the one that exists."""
        adopted = ensure_job(self.backend, self.job, log=self.log)
        self._restarts = 0 if adopted is None else None

    def follow_until(self, is_trained: Callable[[], bool]) -> None:
        """Logs each change of the job's state and each training step until `is_trained`.

        Raises `BapoError` when the job fails, restarts without training, is deleted repeatedly,
        does not get its nodes within `start_within_s`, or runs for `STALLED_WITHIN_S` without a
        training step.
        """
        self._step = self.check_run().current_step
        self._at = time.monotonic()
        while not is_trained():
            run = self.check_run()
            state = self.backend.state(self.job.name)
            if state is None:
                self._create_again()
                continue
            self._check(state, run, is_trained)
            reason = f": {state.reason}" if state.reason else ""
            line = f"job {self.job.name} is {state.phase}{reason}"
            self._lines.say(line, later=lambda: f" without a step: {self.describe_rollouts()}")
            self._log_steps(state)
            time.sleep(POLL_INTERVAL_S)
        self._log_steps()

    def _create_again(self) -> None:
        name = self.job.name
        if self._creations == MAX_CREATIONS:
            raise BapoError(
                f"job {name} was deleted {self._creations} times while it trained; find out who "
                "deletes it (the audit log of Kubernetes), then retry the step"
            )
        self._creations += 1
        self.log(f"job {name} was deleted while it trained, and is created again")
        self.ensure_job()

    def _check(self, state: JobState, run: wire.RunState, is_trained: Callable[[], bool]) -> None:
        """Raises `BapoError` for a job that will not train."""
        name = self.job.name
        if state.phase == "failed":
            raise BapoError(f"job {name} failed: {state.reason}{self._remedy(state.reason)}")
        if state.phase == "succeeded" and not is_trained():
            raise BapoError(
                f"job {name} succeeded, but run {run.name!r} is at step {run.current_step}; was "
                "the run rewound meanwhile?"
            )
        if self._restarts is None:
            self._restarts = state.restarts
        restarts = state.restarts - self._restarts
        if restarts >= MAX_RESTARTS:
            raise BapoError(
                f"job {name} restarted {restarts} times without a training step: "
                f"{state.last_end or 'Kubernetes gives no reason'}{self._remedy(state.last_end)}"
            )
        now = time.monotonic()
        if state.phase != "running":
            self._waited_s += now - self._at
        elif run.status != "paused":
            self._stalled_s += now - self._at
        self._blocked_s = self._blocked_s + now - self._at if state.blocked else 0.0
        self._at = now
        if self._blocked_s > min(BLOCKED_WITHIN_S, self.start_within_s):
            limit = min(BLOCKED_WITHIN_S, self.start_within_s)
            raise BapoError(
                f"job {name} has not started within {limit:.0f} s: {state.reason}"
                f"{self._remedy(state.reason)}"
            )
        if self._waited_s > self.start_within_s:
            reason = state.reason or ("Kubernetes gives no reason; does the training operator run?")
            raise BapoError(
                f"job {name} has not started within {self.start_within_s:.0f} s: {reason}"
                f"{self._remedy(reason)}"
            )

        if self._stalled_s > STALLED_WITHIN_S:
            raise BapoError(
                f"job {name} has run for {STALLED_WITHIN_S / 3600:.0f} h without a training step "
                f"({self.describe_rollouts()}); see the logs of the collector and the trainer, "
                "then retry the step"
            )

    def _remedy(self, reason: str) -> str:
        """Returns what a person changes, as `; …`, where that is known."""
        for part, remedy in REMEDIES.items():
            if part in reason:
                text = remedy.format(
                    memory=self.job.resources.memory,
                    namespace=self.job.deployment.namespace,
                    image=self.job.deployment.image,
                )
                return f"; {text}"
        return ""

    def _log_steps(self, state: JobState | None = None) -> None:
        """Logs the training steps since the last call, after which the counts begin again."""
        for step in self.buffer.steps(after=self._step):
            groups = [
                f"{step.counts.get(key, 0)} {word}"
                for key, word in (
                    ("fresh", "fresh"),
                    ("reevaluated", "re-evaluated"),
                    ("replayed", "replayed"),
                )
            ]
            self.log(
                f"step {step.step}: reward {step.mean_reward:.3f}, groups {' + '.join(groups)}"
            )
            self._step, self._waited_s, self._stalled_s = step.step, 0.0, 0.0
            self._lines.restart()
            if state is not None:
                self._restarts = state.restarts
