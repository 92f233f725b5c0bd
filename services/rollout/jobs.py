"""The jobs of a collector: their order, and the groups of an active job before their delivery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from bapo_core.config import ConfigHistory
from services.buffer.api import wire
from services.buffer.api.wire import Rollouts
from services.rollout.api.wire import GeneratedGroup

log = logging.getLogger(__name__)

BUNDLE = 64
"""Groups that are scored and delivered together, before all groups of the job are generated."""
DELIVER_WITHIN_S = 2.0
"""Longest time in seconds for which a finished group waits for its bundle, which bounds what is
lost if the collector dies."""


def plan_jobs(
    configs: ConfigHistory,
    first_step: int,
    evaluated: Collection[tuple[int, str]] = (),
    *,
    own_from: int = 1,
) -> Iterator[Rollouts]:
    """Yields all jobs from `first_step` to the end of the run, in order.

    Evaluations of earlier steps come first, because a run may have been interrupted before them:
    all but those that are `evaluated`, as (policy version, evaluation set). Versions before
    `own_from` are of the run that this one is a fork of.

    With a lag, versions that the trainer is yet to publish are evaluated when rollouts need newer
    ones, so that these do not wait for them.
    """
    for step in range(own_from, first_step):
        for job in _evaluations(configs, step):
            if (job.step, job.evaluation_set) not in evaluated:
                yield job
    config = configs.current
    step = next_evaluated = first_step
    while step <= config.steps:
        end = min(config.schedule.sync_window(step).stop, config.steps + 1)
        for t in range(step, end):
            yield Rollouts(t, "fresh")
            if config.reevaluates_at(t):
                yield Rollouts(t, "reevaluation")
        for version in range(next_evaluated, end - config.sync.lag):
            yield from _evaluations(configs, version)
        step, next_evaluated = end, max(next_evaluated, end - config.sync.lag)
    for version in range(next_evaluated, config.steps + 2):
        yield from _evaluations(configs, version)


def _evaluations(configs: ConfigHistory, version: int) -> list[Rollouts]:
    names = configs.at(version).evaluation_sets_at(version)
    return [Rollouts(version, "evaluation", name) for name in names]


@dataclass
class ActiveJob:
    """A job whose groups are being generated, with the generated groups that wait for delivery."""

    job: Rollouts
    groups: list[GeneratedGroup] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    oldest_at: float = 0.0
    """Time at which the first of `groups` was finished, by the event loop's clock."""
    begun: bool = False
    """Whether a replica serves the weights, so that groups are being generated."""
    weights: wire.StoredVersion | None = None
    """Weights under which the responses continue; None for the weights of the job's own version."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set together with `weights`."""

    def interrupt(self, weights: wire.StoredVersion) -> None:
        """Makes unfinished responses continue under `weights`."""
        log.info(
            "version %d of the weights goes on with the rollouts of step %d",
            weights.number,
            self.job.step,
        )
        self.weights = weights
        self.begun = False
        self.interrupted.set()

    def add(self, group: GeneratedGroup) -> None:
        """Adds a generated group, which waits for delivery."""
        if not self.groups:
            self.oldest_at = asyncio.get_running_loop().time()
        self.groups.append(group)
        self.changed.set()

    async def next_delivery(self, generating: asyncio.Task[None]) -> list[GeneratedGroup]:
        """Takes the groups to deliver together, once they are enough or one has waited long enough.

        Raises the error of `generating` if it has failed, once all groups have been taken.
        """
        while len(self.groups) < BUNDLE and not generating.done():
            self.changed.clear()
            deadline = self.oldest_at + DELIVER_WITHIN_S if self.groups else None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.changed.wait()
                continue
            break
        if generating.done() and not self.groups:
            generating.result()
        taken, self.groups = self.groups, []
        return taken
