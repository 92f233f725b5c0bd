"""The collector rolls out a run's prompts and delivers scored groups to the buffer service.

The rollout policy does not change within a sync window (the steps between two syncs), so the
collector runs ahead of the trainer to the window's end, unless the sampler's prompts depend on the
commit of the step before (`sampler.posterior_as_of: step`). With dynamic sampling, a step begins
once all groups of the step before are delivered, which decide where its prompts begin. Evaluations
come last in a window, when the engine would otherwise wait for new weights.

The responses of a window end before the next window begins, or continue under its weights
(`sync.interrupt_rollouts`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.config import ConfigHistory, RunConfig
from bapo_core.errors import BapoError, ConfigError, TaskError
from bapo_core.reward_files import stored_digest
from bapo_core.tasks import Task, get_task
from services.buffer.api import wire
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.buffer.api.spans import SpanRecorder
from services.common import layout
from services.common.errors import ServiceError, ServiceUnavailable, Superseded
from services.common.objectstore import ObjectStore
from services.common.threads import run_detached
from services.model.conversation import load_tokenizer
from services.model.stored import fetch_model, model_on_disk
from services.model.vision import VisionProcessor, load_processor
from services.rollout.api.addresses import ReplicaHosts
from services.rollout.api.wire import (
    GeneratedGroup,
    GenerateRequest,
)
from services.rollout.delivery import Delivery, task_options
from services.rollout.errors import PromptsFailed
from services.rollout.fleet import Fleet
from services.rollout.jobs import ActiveJob, plan_jobs
from services.rollout.journal import Journal, delete_journals
from services.rollout.requests import RequestBuilder
from services.rollout.settings import CollectorSettings
from services.rollout.unfinished import UnfinishedGroups
from services.verifier.api.client import VerifierClient
from services.verifier.api.trial import try_functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CONCURRENT_JOBS = 2
"""Jobs in progress at a time: the next one starts while the last groups of one are still being
generated. Bounds memory."""
FIRST_ATTEMPT_POLL_INTERVAL_S = 1.0
POLL_INTERVAL_S = 2.0
UNPROCESSABLE = 422
"""Status with which the verifier refuses a task, its options and its payloads."""
FINISH_WITHIN_S = 60.0
"""Seconds that groups in progress have to end after a new attempt has begun."""


class Collector:
    """Runs jobs: a job's groups are scored and delivered while the next job is generated.

    Groups that the buffer service has already are not generated again.
    """

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        store: ObjectStore,
        fleet: Fleet,
        verifier: VerifierClient,
        tokenizer: PreTrainedTokenizerBase,
        vision: VisionProcessor | None = None,
        *,
        follows: bool = False,
        reward_file: str | None = None,
    ) -> None:
        """store: holds the journal of unfinished responses.

        vision: the processor of a model that reads images.

        reward_file: the text of the file of `task.reward`.

        follows: whether it adopts the next attempt when one begins.
        """
        self._config, self._buffer, self._store, self._fleet = config, buffer, store, fleet
        self._follows = follows
        self._version = 0
        self._active: dict[asyncio.Task[bool], ActiveJob] = {}
        self._spans = SpanRecorder(buffer, "collector")
        tasks: dict[str | None, Task] = {
            name: get_task(config.task.name, **options)
            for name, options in task_options(config).items()
        }
        self._requests = RequestBuilder(config, tokenizer, vision, tasks)
        self._delivery = Delivery(
            config, buffer, verifier, tokenizer, tasks, self._spans, reward_file
        )

    async def collect(self, first_step: int) -> None:
        """Runs all jobs from `first_step` to the end of the run.

        Raises `Superseded` once a newer attempt of the run has begun, unless the collector follows
        it, and when the run is stopped.
        """
        async with self._fleet.watched():
            try:
                while True:
                    try:
                        return await self._collect_in_attempt(first_step)
                    except Superseded as error:
                        first_step = await self._follow(error)
            finally:
                for task in self._active:
                    task.cancel()
                await asyncio.gather(*self._active, return_exceptions=True)

    async def _collect_in_attempt(self, first_step: int) -> None:
        """Runs all jobs from `first_step` on, as planned in the buffer client's present attempt.

        Raises `Superseded` once another attempt has begun: its jobs are to be planned anew. A
        delivery may have adopted that attempt already, so an end or an error of the jobs may come
        from it, too.
        """
        attempt = self._buffer.attempt
        work = asyncio.create_task(self._run_all(first_step))
        watch = asyncio.create_task(self._watch_attempt(attempt))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            try:
                await (work if work.done() else watch)
            except Superseded:
                raise
            except ServiceError as error:
                await self._check_attempt(attempt, error)
                raise
            await self._check_attempt(attempt)
        finally:
            work.cancel()
            watch.cancel()

    async def _check_attempt(self, attempt: int, cause: ServiceError | None = None) -> None:
        """Raises `Superseded`, because of `cause`, if a newer attempt than `attempt` has begun."""
        state = await run_detached(self._buffer.run_state)
        if state.attempt > attempt:
            raise Superseded(
                409,
                f"attempt {attempt} of the run, for which this collector was started, has ended; "
                f"the run is {state.status}, at attempt {state.attempt}",
            ) from cause

    async def _follow(self, error: Superseded) -> int:
        """Adopts the run's new attempt and returns the step to go on with.

        Groups that are being generated are finished and delivered first, because a rewind keeps
        them as long as the weights are the same. Raises `error` as `_adopt_attempt` does.
        """
        await self._adopt_attempt(error)
        log.warning("the collector follows the run to its new attempt: %s", error)
        for task, active in self._active.items():
            if not active.begun:
                task.cancel()
        if self._active:
            await asyncio.wait(self._active, timeout=FINISH_WITHIN_S)
            for task in self._active:
                task.cancel()
            outcomes = await asyncio.gather(*self._active, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BapoError):
                    log.warning("groups of the attempt before are lost: %s", outcome)
                elif isinstance(outcome, Exception):
                    raise outcome
        self._active, self._version = {}, 0
        return (await self._adopt_attempt(error)).current_step + 1

    async def _adopt_attempt(self, error: Superseded) -> wire.RunState:
        """Works for the run's current attempt from now on.

        Raises `error` if the collector belongs to a single attempt, or the run is not active.
        """
        if not self._follows:
            raise error
        state = await run_detached(self._buffer.run_state)
        if state.status not in wire.ACTIVE_STATUSES:
            raise error
        self._buffer.attempt = state.attempt
        return state

    async def _run_all(self, first_step: int) -> None:
        sets = await run_detached(self._buffer.evaluation_sets)
        evaluated = {(row.version, view.name) for view in sets for row in view.evaluations}
        # An attempt may have begun with a change of the configuration.
        state = await run_detached(self._buffer.run_state)
        own_from = 1 if state.forked_from is None else state.forked_from.step + 1
        configs = ConfigHistory(self._config, state.changes)
        for job in plan_jobs(configs, first_step, evaluated, own_from=own_from):
            await self._run(job)
        await self._limit_active(0)

    async def _watch_attempt(self, attempt: int) -> None:
        """Raises `Superseded` once a newer attempt than `attempt` has begun.

        A collector that waits for weights or replicas makes no call that the buffer service could
        refuse, and would otherwise never learn of the new attempt.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self._check_attempt(attempt)
            except ServiceUnavailable as error:
                log.warning("%s", error)

    async def _run(self, job: wire.Rollouts) -> None:
        version = self._config.rollout_version(job.step, job.kind)
        weights = None
        if version != self._version:
            weights = await self._wait_until_version_may_change(version)
        await self._limit_active(CONCURRENT_JOBS - 1)
        rounds = self._config.rollout.max_generation_rounds if job.kind == "fresh" else 1
        for generation_round in range(rounds):
            prompts = await run_detached(
                partial(self._buffer.step_prompts, evaluation_set=job.evaluation_set),
                job.step,
                job.kind,
                generation_round,
            )
            if prompts.complete or not prompts.prompts:
                await self._delete_journals(job, generation_round)
                return
            self._version = version
            if weights is not None:
                # Only now are they the replicas' target.
                for interrupted in self._active.values():
                    interrupted.interrupt(weights)
            active = ActiveJob(job)
            roll_out = asyncio.create_task(self._roll_out(generation_round, prompts, active))
            self._active[roll_out] = active
            # Only dynamic sampling needs the rewards before it can tell whether to go on.
            if rounds > 1:
                await self._limit_active(0)
                if roll_out.result():
                    return

    async def _wait_until_version_may_change(self, version: int) -> wire.StoredVersion | None:
        """Waits until the replicas' target version may change.

        A job that asks for its prompts sets the target version, so all groups of the version before
        must have been generated; or, if new weights interrupt rollouts, `version` must be
        published. An evaluation is of one version, and is not interrupted.

        Returns the weights under which the active jobs continue; None if there are no such jobs.
        """
        if version < self._version or not self._config.interrupts_rollouts:
            await self._limit_active(0)
            return None
        await self._limit_active(CONCURRENT_JOBS - 1)
        published = asyncio.create_task(self._wait_for_weights(version))
        try:
            while self._active and not (
                published.done() and all(r.job.kind == "fresh" for r in self._active.values())
            ):
                await self._wait_for_any(published)
        finally:
            published.cancel()
            await asyncio.wait({published})
        return published.result() if self._active else None

    async def _limit_active(self, count: int) -> None:
        """Waits until at most `count` jobs are active; raises the error of one that failed."""
        while len(self._active) > count:
            await self._wait_for_any()

    async def _wait_for_any(self, *others: asyncio.Task[Any]) -> None:
        """Waits until an active job has ended, or one of `others` that had not.

        Raises the error of a job that failed.
        """
        waited = [*self._active, *(task for task in others if not task.done())]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in self._active if task.done()]
        for task in ended:
            del self._active[task]
        # The errors of all must be asked for, or asyncio logs the others as errors.
        await asyncio.gather(*ended, return_exceptions=True)
        for task in ended:
            task.result()

    async def _roll_out(
        self, generation_round: int, prompts: wire.StepPrompts, active: ActiveJob
    ) -> bool:
        """Generates, scores and delivers groups; returns whether the job is complete with them."""
        job = active.job
        recorded = set(prompts.recorded)
        missing = {
            index for index, prompt in enumerate(prompts.prompts) if prompt.uid not in recorded
        }
        if not missing:
            return False
        weights = await self._wait_for_weights(prompts.policy_version)
        request = self._requests.build(job, prompts, weights)
        complete = False
        async with self._unfinished(job, generation_round, request) as unfinished:
            unfinished.keep(missing)
            if unfinished.token_count:
                log.info(
                    "%d tokens of unfinished %s responses are continued",
                    unfinished.token_count,
                    job.kind,
                    extra={"step": job.step},
                )
            generating = asyncio.create_task(
                self._generate(request, active, frozenset(missing), unfinished)
            )
            generating.add_done_callback(lambda _: active.changed.set())
            try:
                while missing:
                    try:
                        bundle = await active.next_delivery(generating)
                    except PromptsFailed as error:
                        uids = [prompts.prompts[index].uid for index in error.indices]
                        raise PromptsFailed(
                            error.indices, f"{_describe_prompts(uids)}: {error}"
                        ) from error
                    indices = {group.index for group in bundle}
                    deliver = partial(
                        self._delivery.deliver, job, prompts, request, bundle, unfinished
                    )
                    try:
                        complete = await asyncio.to_thread(deliver)
                    except Superseded as error:
                        await self._adopt_attempt(error)
                        complete = await asyncio.to_thread(deliver)
                    missing -= indices
                    unfinished.discard(indices)
                await asyncio.to_thread(self._spans.flush)
            finally:
                generating.cancel()
        return complete

    @asynccontextmanager
    async def _unfinished(
        self, job: wire.Rollouts, generation_round: int, request: GenerateRequest
    ) -> AsyncIterator[UnfinishedGroups]:
        """Yields the unfinished responses to a request, which are journalled if the run says so."""
        interval_s = self._config.journal_interval_s
        if not interval_s:
            yield UnfinishedGroups(request.group_size)
            return
        prefix = self._journal_prefix(job, generation_round)
        async with Journal(self._store, prefix, request).kept(interval_s) as unfinished:
            yield unfinished

    async def _delete_journals(self, job: wire.Rollouts, generation_round: int) -> None:
        """Deletes what a collector left that died after its last delivery for the job."""
        if self._config.journal_interval_s:
            prefix = self._journal_prefix(job, generation_round)
            await asyncio.to_thread(delete_journals, self._store, prefix)

    def _journal_prefix(self, job: wire.Rollouts, generation_round: int) -> str:
        part = job.evaluation_set or generation_round
        return layout.journal(self._buffer.run, job.step, job.kind, part)

    async def _generate(
        self,
        request: GenerateRequest,
        active: ActiveJob,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        """Generates the groups with these indices, under new weights once it is interrupted."""
        missing = set(indices)

        def on_group(group: GeneratedGroup) -> None:
            missing.discard(group.index)
            active.add(group)

        while missing:
            generating = asyncio.create_task(
                self._generate_by_one_version(request, active, missing, on_group, unfinished)
            )
            interrupted = asyncio.create_task(active.interrupted.wait())
            try:
                await asyncio.wait({generating, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                interrupted.cancel()
                generating.cancel()
                await asyncio.wait({generating})
            if not generating.cancelled():
                generating.result()
            active.interrupted.clear()
            if active.weights is not None:
                request = request.model_copy(
                    update={
                        "policy_version": active.weights.number,
                        "manifest_digest": active.weights.manifest_digest,
                    }
                )

    async def _generate_by_one_version(
        self,
        request: GenerateRequest,
        active: ActiveJob,
        missing: Collection[int],
        on_group: Callable[[GeneratedGroup], None],
        unfinished: UnfinishedGroups,
    ) -> None:
        """Calls `on_group` with the groups that are missing, once the version is served."""
        with self._spans.span("await weights", active.job.step):
            await self._fleet.wait_until_served(request)
        active.begun = True
        with self._spans.span(active.job.kind, active.job.step):
            await self._fleet.generate(
                request, on_group, indices=frozenset(missing), unfinished=unfinished
            )

    async def _wait_for_weights(self, version: int) -> wire.StoredVersion:
        while True:
            try:
                return await run_detached(self._buffer.weights, version, wait=LONG_POLL_S)
            except ServiceError as error:
                if error.status != 404:
                    raise


def _describe_prompts(uids: Sequence[str]) -> str:
    """Returns the first uids, and how many others there are, for people."""
    named = ", ".join(map(repr, uids[:3]))
    more = f" and {len(uids) - 3} more" if len(uids) > 3 else ""
    return f"{'prompts' if len(uids) > 1 else 'prompt'} {named}{more}"


def tokenizer_directory(path: str, settings: CollectorSettings) -> Path:
    """Returns the directory of the initial model's tokenizer; weights are not fetched."""
    directory = model_on_disk(path, settings.model)
    if directory is not None:
        return directory
    store = ObjectStore(settings.s3)
    return fetch_model(path, store, settings.scratch / "model", weights=False)


def wait_for_attempt(buffer: BufferClient) -> wire.RunState:
    """Waits until a trainer has begun the run's first attempt, and returns the run's state."""
    while (state := buffer.run_state()).attempt == 0:
        time.sleep(FIRST_ATTEMPT_POLL_INTERVAL_S)
    return state


def finish_run(buffer: BufferClient, config: RunConfig) -> None:
    """Marks a run whose evaluations are delivered as finished once its last checkpoint is stored.

    The replicas then serve the next run, also while the run's pipeline still reports it. Raises
    `Superseded` when another attempt has begun meanwhile.
    """
    while not any(checkpoint.step >= config.steps for checkpoint in buffer.checkpoints()):
        time.sleep(POLL_INTERVAL_S)
    buffer.set_status("finished")
    log.info("run %s is finished", config.name)


def load_reward_file(
    state: wire.RunState, buffer: BufferClient, verifier: VerifierClient
) -> str | None:
    """Returns the text of the run's reward file; None for another task.

    Before the first step, its functions are tried on that step's prompts. Raises `RewardError` if
    one gives no reward, and `ServiceError` if the verifier cannot import the file.
    """
    functions = state.config.task.functions
    if functions is None:
        return None
    text = buffer.reward_file(stored_digest(functions))
    if state.current_step == 0:
        prompts = buffer.step_prompts(1, "fresh").prompts
        try_functions(functions, text, (prompt.payload for prompt in prompts), verifier.verify)
    return text


@contextmanager
def stop_faulty_run(buffer: BufferClient) -> Iterator[None]:
    """Stops the run, with the reason, when its task, prompts or configuration are at fault.

    A restart of the collector would fail in the same way, while the trainer and the pipeline wait
    for rollouts. Errors of services stop no run, because they end with a change of the release: the
    verifier refuses the token of a collector that is about to be replaced, for example. The error
    is raised again. Raises `Superseded` instead when another attempt has begun meanwhile.
    """
    try:
        yield
    except (TaskError, ConfigError, PromptsFailed, ServiceError) as error:
        if isinstance(error, ServiceError) and error.status != UNPROCESSABLE:
            raise
        reason = error.detail if isinstance(error, ServiceError) else str(error)
        buffer.stop_own(by="the collector", reason=reason)
        log.warning("run %s is stopped, because it would fail again", buffer.run)
        raise


def main() -> None:
    from services.common.logs import configure_logs
    from services.common.process import hide_memory, run_until_error

    configure_logs("collector")
    hide_memory()

    def collect() -> None:
        settings = CollectorSettings.load()
        token = settings.token.get_secret_value()
        while True:
            buffer = BufferClient(settings.buffer_url, token, run=settings.run)
            pinned = settings.attempt is not None
            state = buffer.run_state() if pinned else wait_for_attempt(buffer)
            buffer.attempt = state.attempt if settings.attempt is None else settings.attempt
            try:
                # `bapo run` records the end of its run itself.
                with nullcontext() if pinned else stop_faulty_run(buffer):
                    collector = make_collector(state, buffer, settings)
                    asyncio.run(collector.collect(state.current_step + 1))
                if not pinned:
                    finish_run(buffer, buffer.run_state().config)
            except Superseded as error:
                if pinned:
                    raise
                log.warning("the collector starts again for the new attempt: %s", error)
            else:
                return

    def make_collector(
        state: wire.RunState, buffer: BufferClient, settings: CollectorSettings
    ) -> Collector:
        config = state.config
        verifier = VerifierClient(settings.verifier_url, settings.verifier_token.get_secret_value())
        reward_file = load_reward_file(state, buffer, verifier)
        directory = tokenizer_directory(config.model.path, settings)
        return Collector(
            config,
            buffer,
            ObjectStore(settings.s3),
            Fleet(buffer, ReplicaHosts(settings.replica_hosts)),
            verifier,
            load_tokenizer(directory),
            load_processor(directory),
            follows=settings.attempt is None,
            reward_file=reward_file,
        )

    run_until_error(collect)


if __name__ == "__main__":
    main()
