"""The collector rolls out prompts, scores the responses, and delivers groups to the buffer service.

The rollout policy does not change within a sync window (the steps between two syncs), so the
collector runs ahead of the trainer to the window's end, unless the sampler's prompts depend on the
commit of the step before (`sampler.as_of: step`). With dynamic sampling, a step begins once all
groups of the step before are delivered, which decide where its prompts begin. Evaluations come last
in a window, when the engine would otherwise wait for new weights.

The responses of a window end before the next one begins, or its weights go on with them
(`sync.interrupt_rollouts`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.outcomes import Outcome
from bapo_core.rewards import check_reward, check_reward_sign, reward_parts, total_reward
from bapo_core.seeding import derive_seed
from bapo_core.tasks import Task, get_task, normalise_answer
from services.buffer.api import wire
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.common import layout
from services.common.errors import ServiceError, ServiceUnavailable, Superseded
from services.common.objectstore import ObjectStore
from services.common.threads import run_detached
from services.datasets.images import image_digests
from services.model.conversation import decode_response, load_tokenizer, tokenize_conversation
from services.model.stored import fetch_model, model_on_disk
from services.model.vision import VisionProcessor, load_processor
from services.rollout.api.wire import (
    GeneratedGroup,
    GeneratedResponse,
    GenerateRequest,
    PromptRequest,
)
from services.rollout.fleet import Fleet
from services.rollout.journal import Journal, delete_journals
from services.rollout.settings import CollectorSettings
from services.rollout.unfinished import UnfinishedGroups
from services.verifier.api.client import VerifierClient
from services.verifier.api.wire import ItemVerdict, VerifyItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CONCURRENT_JOBS = 2
"""Jobs in progress at a time: the next one starts while the last groups of one are still being
generated. Bounds memory."""
FIRST_ATTEMPT_POLL_INTERVAL_S = 1.0
POLL_INTERVAL_S = 2.0
BUNDLE = 64
"""Groups that are scored and delivered together, before all groups of the job are generated."""
FINISH_WITHIN_S = 60.0
"""Seconds that groups in progress have to end after a new attempt has begun."""
STREAM_EVERY = 32
"""Tokens of a response after which replicas stream them if there is a journal."""
STREAM_EVERY_TO_INTERRUPT = 1
"""Tokens of a response after which replicas stream them if new weights interrupt rollouts. An
interruption discards tokens that have not been streamed, whereas the end of a response is streamed
at once. So any larger number would bias responses towards short ones."""
FAILURES_TO_GIVE_UP = 32
"""Responses after which a reward function that has given no verdict ends the run."""
DELIVER_WITHIN_S = 2.0
"""Seconds after which fewer groups are delivered, which bounds what a collector that dies loses."""


@dataclass(frozen=True, slots=True)
class Job:
    """Rollouts of one kind for one step; those of an evaluation, for one set."""

    step: int
    kind: wire.Kind
    evaluation_set: str | None = None


def plan_jobs(
    config: RunConfig, first_step: int, evaluated: Collection[tuple[int, str]] = ()
) -> Iterator[Job]:
    """Yields all jobs from `first_step` to the end of the run, in order.

    Evaluations of earlier steps come first, because a run may have been interrupted before them:
    all but those that are `evaluated`, as (policy version, evaluation set).

    With a lag, versions that the trainer is yet to publish are evaluated when rollouts need newer
    ones, so that these do not wait for them.
    """
    for step in range(1, first_step):
        for job in _evaluations(config, step):
            if (job.step, job.evaluation_set) not in evaluated:
                yield job
    step = next_evaluated = first_step
    while step <= config.steps:
        end = min(config.schedule.sync_window(step).stop, config.steps + 1)
        for t in range(step, end):
            yield Job(t, "fresh")
            if config.reevaluate.enabled and config.schedule.reevaluates_at(t):
                yield Job(t, "reevaluation")
        for version in range(next_evaluated, end - config.sync.lag):
            yield from _evaluations(config, version)
        step, next_evaluated = end, max(next_evaluated, end - config.sync.lag)
    for version in range(next_evaluated, config.steps + 2):
        yield from _evaluations(config, version)


def _evaluations(config: RunConfig, version: int) -> list[Job]:
    return [Job(version, "evaluation", name) for name in config.evaluation_sets_at(version)]


@dataclass
class _Running:
    """A job whose groups are being generated, and those of them that are not delivered yet."""

    job: Job
    groups: list[GeneratedGroup] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    oldest_at: float = 0.0
    """Time at which the first of them was finished, by the event loop's clock."""
    begun: bool = False
    """Whether a replica serves the weights, so that groups are being generated."""
    weights: wire.StoredVersion | None = None
    """Weights that are to go on with the responses; None for those of the job's own version."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `weights` was."""

    def interrupt(self, weights: wire.StoredVersion) -> None:
        """Has `weights` go on with the responses that have not ended."""
        log.info(
            "version %d of the weights goes on with the rollouts of step %d",
            weights.number,
            self.job.step,
        )
        self.weights = weights
        self.begun = False
        self.interrupted.set()

    def add(self, group: GeneratedGroup) -> None:
        if not self.groups:
            self.oldest_at = asyncio.get_running_loop().time()
        self.groups.append(group)
        self.changed.set()

    async def take_bundle(self, generating: asyncio.Task[None]) -> list[GeneratedGroup]:
        """Takes what is to be delivered together, once there is enough or the time is up.

        Raises the error of `generating` if that has failed, once all groups have been taken.
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


class Collector:
    """Runs jobs, and scores and delivers a job's groups while the next job is generated.

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
        created: date | None = None,
    ) -> None:
        """store: holds the journal of unfinished responses.

        vision: the processor of a model that reads images.

        follows: whether it adopts the next attempt when one begins. created: day on which the run
        was created, which chat templates print unless `rollout.prompt_date` is set.
        """
        self._config, self._buffer, self._store, self._fleet = config, buffer, store, fleet
        self._verifier, self._tokenizer, self._vision = verifier, tokenizer, vision
        self._follows = follows
        self._day = config.rollout.prompt_date or created
        self._sets = config.evaluation_sets
        self._options: dict[str | None, dict[str, Any]] = {
            None: config.task.options,
            **{name: dict(settings.options) for name, settings in self._sets.items()},
        }
        self._tasks = {
            name: get_task(config.task.name, **options) for name, options in self._options.items()
        }
        check_reward(self._tasks[None], config.reward)
        self._judged = self._failures = 0
        """Responses so far on which the reward function gave a verdict, and on which it failed."""
        self._version = 0
        self._running: dict[asyncio.Task[bool], _Running] = {}
        self._spans = SpanRecorder(buffer, "collector")

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
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)

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
        for task, running in self._running.items():
            if not running.begun:
                task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=FINISH_WITHIN_S)
            for task in self._running:
                task.cancel()
            outcomes = await asyncio.gather(*self._running, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BapoError):
                    log.warning("groups of the attempt before are lost: %s", outcome)
                elif isinstance(outcome, Exception):
                    raise outcome
        self._running, self._version = {}, 0
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
        for job in plan_jobs(self._config, first_step, evaluated):
            await self._run(job)
        await self._limit_running(0)

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

    async def _run(self, job: Job) -> None:
        version = self._config.rollout_version(job.step, job.kind)
        weights = await self._leave_version(version) if version != self._version else None
        await self._limit_running(CONCURRENT_JOBS - 1)
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
                for interrupted in self._running.values():
                    interrupted.interrupt(weights)
            running = _Running(job)
            roll_out = asyncio.create_task(self._roll_out(generation_round, prompts, running))
            self._running[roll_out] = running
            # Only dynamic sampling needs the rewards before it can tell whether to go on.
            if rounds > 1:
                await self._limit_running(0)
                if roll_out.result():
                    return

    async def _leave_version(self, version: int) -> wire.StoredVersion | None:
        """Waits until a job of another version may ask for its prompts.

        Asking for them sets the replicas' target version, so all groups of the version before must
        have been generated; or, if new weights interrupt rollouts, `version` must be published. An
        evaluation is of one version, and is not interrupted.

        Returns the weights that are to go on with the running jobs; None if there are no such jobs.
        """
        if version < self._version or not self._config.interrupts_rollouts:
            await self._limit_running(0)
            return None
        await self._limit_running(CONCURRENT_JOBS - 1)
        published = asyncio.create_task(self._wait_for_weights(version))
        try:
            while self._running and not (
                published.done() and all(r.job.kind == "fresh" for r in self._running.values())
            ):
                await self._wait_for_any(published)
        finally:
            published.cancel()
            await asyncio.wait({published})
        return published.result() if self._running else None

    async def _limit_running(self, count: int) -> None:
        """Waits until at most `count` jobs are running; raises the error of one that failed."""
        while len(self._running) > count:
            await self._wait_for_any()

    async def _wait_for_any(self, *others: asyncio.Task[Any]) -> None:
        """Waits until a running job has ended, or one of `others` that had not.

        Raises the error of a job that failed.
        """
        waited = [*self._running, *(task for task in others if not task.done())]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in self._running if task.done()]
        for task in ended:
            del self._running[task]
        # The errors of all must be asked for, or asyncio logs those of the others as errors.
        await asyncio.gather(*ended, return_exceptions=True)
        for task in ended:
            task.result()

    async def _roll_out(
        self, generation_round: int, prompts: wire.StepPrompts, running: _Running
    ) -> bool:
        """Generates, scores and delivers groups; returns whether the job is complete with them."""
        job = running.job
        recorded = set(prompts.recorded)
        missing = {
            index for index, prompt in enumerate(prompts.prompts) if prompt.uid not in recorded
        }
        if not missing:
            return False
        request = await self._prepare_request(job, prompts)
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
                self._generate(request, running, frozenset(missing), unfinished)
            )
            generating.add_done_callback(lambda _: running.changed.set())
            try:
                while missing:
                    bundle = await running.take_bundle(generating)
                    indices = {group.index for group in bundle}
                    deliver = partial(self._deliver, job, prompts, request, bundle, unfinished)
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
        self, job: Job, generation_round: int, request: GenerateRequest
    ) -> AsyncIterator[UnfinishedGroups]:
        """Yields the unfinished responses to a request, which are journalled if the run says so."""
        interval_s = self._config.journal_interval_s
        if not interval_s:
            yield UnfinishedGroups(request.group_size)
            return
        prefix = self._journal_prefix(job, generation_round)
        async with Journal(self._store, prefix, request).kept(interval_s) as unfinished:
            yield unfinished

    async def _delete_journals(self, job: Job, generation_round: int) -> None:
        """Deletes what a collector left that died after its last delivery for the job."""
        if self._config.journal_interval_s:
            prefix = self._journal_prefix(job, generation_round)
            await asyncio.to_thread(delete_journals, self._store, prefix)

    def _journal_prefix(self, job: Job, generation_round: int) -> str:
        part = job.evaluation_set or generation_round
        return layout.journal(self._buffer.run, job.step, job.kind, part)

    async def _prepare_request(self, job: Job, prompts: wire.StepPrompts) -> GenerateRequest:
        """Waits until the job's version is published and tokenizes the prompts."""
        weights = await self._wait_for_weights(prompts.policy_version)
        rollout = self._config.rollout
        stream_every = STREAM_EVERY if self._config.journal_interval_s else 0
        if self._config.interrupts_rollouts:
            stream_every = STREAM_EVERY_TO_INTERRUPT
        evaluated = self._sets[job.evaluation_set] if job.evaluation_set else None
        return GenerateRequest(
            policy_version=prompts.policy_version,
            manifest_digest=weights.manifest_digest,
            temperature=evaluated.temperature if evaluated else rollout.temperature,
            top_p=evaluated.top_p if evaluated else 1.0,
            max_tokens=rollout.max_response_tokens,
            group_size=evaluated.samples if evaluated else rollout.group_size,
            prompts=[
                PromptRequest(
                    prompt_token_ids=self._tokenize(job, prompt),
                    images=image_digests(prompt.payload),
                    seed=derive_seed(self._config.seed, job.kind, job.step, prompt.uid),
                )
                for prompt in prompts.prompts
            ],
            stream_every=stream_every,
        )

    async def _generate(
        self,
        request: GenerateRequest,
        running: _Running,
        indices: Collection[int],
        unfinished: UnfinishedGroups,
    ) -> None:
        """Generates the groups with these indices; if interrupted, goes on with the new weights."""
        missing = set(indices)

        def on_group(group: GeneratedGroup) -> None:
            missing.discard(group.index)
            running.add(group)

        while missing:
            generating = asyncio.create_task(
                self._generate_by_one_version(request, running, missing, on_group, unfinished)
            )
            interrupted = asyncio.create_task(running.interrupted.wait())
            try:
                await asyncio.wait({generating, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                interrupted.cancel()
                generating.cancel()
                await asyncio.wait({generating})
            if not generating.cancelled():
                generating.result()
            running.interrupted.clear()
            if running.weights is not None:
                request = request.model_copy(
                    update={
                        "policy_version": running.weights.number,
                        "manifest_digest": running.weights.manifest_digest,
                    }
                )

    async def _generate_by_one_version(
        self,
        request: GenerateRequest,
        running: _Running,
        missing: Collection[int],
        on_group: Callable[[GeneratedGroup], None],
        unfinished: UnfinishedGroups,
    ) -> None:
        """Calls `on_group` with the groups that are missing, once the version is served."""
        with self._spans.span("await weights", running.job.step):
            await self._fleet.wait_until_served(request)
        running.begun = True
        with self._spans.span(running.job.kind, running.job.step):
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

    def _tokenize(self, job: Job, prompt: wire.PromptItem) -> list[int]:
        messages = self._tasks[job.evaluation_set].render(prompt.payload)
        token_ids = tokenize_conversation(self._tokenizer, messages, self._vision, self._day)
        limit = self._config.rollout.max_prompt_tokens
        if len(token_ids) > limit:
            raise BapoError(
                f"prompt {prompt.uid!r} has {len(token_ids)} tokens, more than "
                f"rollout.max_prompt_tokens ({limit}); raise the limit or drop the prompt"
            )
        return token_ids

    def _deliver(
        self,
        job: Job,
        step_prompts: wire.StepPrompts,
        request: GenerateRequest,
        generated: Sequence[GeneratedGroup],
        unfinished: UnfinishedGroups,
    ) -> bool:
        """Scores and delivers groups; returns whether the job is complete with them."""
        prompts = [step_prompts.prompts[group.index] for group in generated]
        task = self._tasks[job.evaluation_set]
        texts = [
            [
                decode_response(
                    self._tokenizer, response.token_ids, ended=response.finish_reason == "stop"
                )
                for response in group.responses
            ]
            for group in generated
        ]
        with self._spans.span("verify", job.step):
            verdicts = self._verifier.verify(
                self._config.task.name,
                self._options[job.evaluation_set],
                [
                    VerifyItem(payload=prompt.payload, responses=answers)
                    for prompt, answers in zip(prompts, texts, strict=True)
                ],
            )
        self._note_failures([verdict for group in verdicts for verdict in group])
        scored_again = self._verifier.repeated
        groups = [
            TrajectoryGroup(
                prompt_uid=prompt.uid,
                prompt_token_ids=request.prompts[group.index].prompt_token_ids,
                policy_version=request.policy_version,
                responses=[
                    self._score_response(
                        response,
                        verdict,
                        text,
                        task,
                        interruptions,
                        _count_repeats(unfinished.lost[group.index], scored_again[number, index]),
                    )
                    for index, (response, verdict, text, interruptions) in enumerate(
                        zip(
                            group.responses,
                            group_verdicts,
                            group_texts,
                            unfinished.interruptions(group.index, request.policy_version)
                            or [{}] * len(group.responses),
                            strict=True,
                        )
                    )
                ],
            )
            for number, (prompt, group, group_verdicts, group_texts) in enumerate(
                zip(prompts, generated, verdicts, texts, strict=True)
            )
        ]
        with self._spans.span("deliver", job.step):
            accepted = self._buffer.post_groups(
                job.step,
                job.kind,
                encode_groups(groups),
                weights=request.manifest_digest,
                evaluation_set=job.evaluation_set,
            )
        log.info("%d %s groups delivered", len(groups), job.kind, extra={"step": job.step})
        return accepted.complete

    def _note_failures(self, verdicts: Sequence[ItemVerdict]) -> None:
        """Logs failures of the reward function.

        Raises `BapoError` if it has failed on all responses so far, once these are enough: such a
        run would train on nothing, or on wrong rewards.
        """
        failures = [verdict for verdict in verdicts if verdict.failed]
        self._judged += len(verdicts) - len(failures)
        if not failures:
            return
        self._failures += len(failures)
        reason = failures[0].failure
        if not self._judged and self._failures >= FAILURES_TO_GIVE_UP:
            raise BapoError(
                f"the reward function of task {self._config.task.name} failed on all "
                f"{self._failures} responses so far: {reason}; mend its `verify`"
            )
        log.warning(
            "the reward function failed on %d of %d responses, which count as wrong: %s",
            len(failures),
            len(verdicts),
            reason,
        )

    def _score_response(
        self,
        response: GeneratedResponse,
        verdict: ItemVerdict,
        text: str,
        task: Task,
        interruptions: dict[int, int],
        repeated: dict[str, int],
    ) -> TrajectoryResponse:
        settings = self._config.reward
        parts = reward_parts(
            verdict.reward,
            verdict.parts,
            tokens=len(response.token_ids),
            max_tokens=self._config.rollout.max_response_tokens,
            settings=settings,
            failed=verdict.failed,
        )
        reward = total_reward(parts, settings)
        check_reward_sign(reward, self._config.advantage.estimator)
        return TrajectoryResponse(
            response.token_ids,
            response.logprobs,
            reward,
            response.finish_reason,
            text,
            verdict.correct,
            parts,
            normalise_answer(task, verdict.extracted),
            interruptions,
            verdict.outcome,
            repeated,
        )


def _count_repeats(engine_lost: int, verifier_lost: int) -> dict[str, int]:
    """Returns how often a response was sampled and scored again, by cause, without zeros."""
    counts = {Outcome.ENGINE_LOST: engine_lost, Outcome.VERIFIER_LOST: verifier_lost}
    return {str(cause): count for cause, count in counts.items() if count}


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


def main() -> None:
    from services.common.logs import configure_logs
    from services.common.process import run_until_error

    configure_logs("collector")

    def collect() -> None:
        settings = CollectorSettings.load()
        token = settings.token.get_secret_value()
        while True:
            buffer = BufferClient(settings.buffer_url, token, run=settings.run)
            pinned = settings.attempt is not None
            state = buffer.run_state() if pinned else wait_for_attempt(buffer)
            buffer.attempt = state.attempt if settings.attempt is None else settings.attempt
            try:
                collector = make_collector(state, buffer, settings)
                asyncio.run(collector.collect(state.current_step + 1))
                if not pinned:  # `bapo run` records the end of its run itself
                    finish_run(buffer, state.config)
            except Superseded as error:
                if pinned:
                    raise
                log.warning("the collector starts again for the new attempt: %s", error)
            else:
                return

    def make_collector(
        state: wire.RunState, buffer: BufferClient, settings: CollectorSettings
    ) -> Collector:
        token = settings.token.get_secret_value()
        config = state.config
        directory = tokenizer_directory(config.model.path, settings)
        return Collector(
            config,
            buffer,
            ObjectStore(settings.s3),
            Fleet(buffer, token),
            VerifierClient(
                settings.verifier_url,
                (settings.verifier_token or settings.token).get_secret_value(),
            ),
            load_tokenizer(directory),
            load_processor(directory),
            follows=settings.attempt is None,
            created=state.created_at.date(),
        )

    run_until_error(collect)


if __name__ == "__main__":
    main()
