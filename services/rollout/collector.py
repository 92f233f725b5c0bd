"""The collector: prompts in, whole scored groups out, ahead of the trainer.

Within a sync window the rollout policy does not change, so the collector runs on to the window's
end without waiting for the trainer. Evaluations come last in a window, when the engine would
otherwise wait for new weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.seeding import derive_seed
from bapo_core.tasks import get_task
from services.buffer.api import wire
from services.buffer.api.client import LONG_POLL_S, BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.common.errors import ServiceError, ServiceUnavailable, Superseded
from services.common.objectstore import ObjectStore
from services.common.threads import run_detached
from services.model.stored import fetch_model, model_on_disk
from services.rollout.api.wire import GeneratedGroup, GenerateRequest, PromptRequest
from services.rollout.fleet import Fleet
from services.rollout.settings import CollectorSettings
from services.verifier.api.client import VerifierClient
from services.verifier.api.wire import VerifyItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

JOBS_UNDER_WAY = 2
"""One is generated while the last groups of the one before are still coming: bounds memory."""
UNBEGUN_S = 1.0
LOOK_EVERY_S = 2.0
BUNDLE = 64
"""Groups that are scored and delivered together, before all of the job are there."""


@dataclass(frozen=True, slots=True)
class Job:
    """Rollouts of one kind for one step."""

    step: int
    kind: wire.Kind


def jobs(config: RunConfig, first_step: int) -> Iterator[Job]:
    """Everything to roll out from `first_step` on, in order.

    Evaluations of earlier steps come first: a run that was interrupted may still owe them.
    """
    for step in range(1, first_step):
        if config.evaluates_at(step):
            yield Job(step, "evaluation")
    step = first_step
    while step <= config.steps:
        end = min(config.schedule.sync_window(step).stop, config.steps + 1)
        for t in range(step, end):
            yield Job(t, "fresh")
            if config.reevaluate.enabled and config.schedule.reevaluates_at(t):
                yield Job(t, "reevaluation")
        for t in range(step, end):
            if config.evaluates_at(t):
                yield Job(t, "evaluation")
        step = end
    yield Job(config.steps + 1, "evaluation")


class Collector:
    """Runs jobs. While one is generated, the groups of the one before are scored and delivered."""

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        fleet: Fleet,
        verifier: VerifierClient,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config, self._buffer, self._fleet = config, buffer, fleet
        self._verifier, self._tokenizer = verifier, tokenizer
        self._task = get_task(config.task.name, **config.task.options)
        self._version = 0
        self._under_way: set[asyncio.Task[bool]] = set()
        self._spans = SpanRecorder(buffer, "collector")

    async def collect(self, first_step: int) -> None:
        """All jobs from `first_step` to the end of the run. Raises `Superseded`."""
        async with self._fleet.watched():
            work = asyncio.create_task(self._run_all(first_step))
            watch = asyncio.create_task(self._until_superseded())
            try:
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
                await (work if work.done() else watch)
            finally:
                for task in (work, watch, *self._under_way):
                    task.cancel()

    async def _run_all(self, first_step: int) -> None:
        for job in jobs(self._config, first_step):
            await self._run(job)
        await self._at_most(0)

    async def _until_superseded(self) -> None:
        """Whoever only waits, for weights or replicas that now come to another attempt, would never
        be told."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                state = await run_detached(self._buffer.run_state)
            except ServiceUnavailable as error:
                log.warning("%s", error)
                continue
            if state.attempt > self._buffer.attempt:
                raise Superseded(409, f"attempt {state.attempt} of the run has begun")

    async def _run(self, job: Job) -> None:
        version = self._config.rollout_version(job.step, job.kind)
        # Asking for prompts tells the replicas which version is wanted: the groups of another
        # version must be there before.
        await self._at_most(JOBS_UNDER_WAY - 1 if version == self._version else 0)
        self._version = version
        rounds = self._config.rollout.max_generation_rounds if job.kind == "fresh" else 1
        for generation_round in range(rounds):
            prompts = await run_detached(
                self._buffer.step_prompts, job.step, job.kind, generation_round
            )
            if prompts.complete or not prompts.prompts:
                return
            roll_out = asyncio.create_task(self._roll_out(job, prompts))
            self._under_way.add(roll_out)
            # Only dynamic sampling needs the outcome before it knows what to generate next.
            if rounds > 1:
                await self._at_most(0)
                if roll_out.result():
                    return

    async def _at_most(self, count: int) -> None:
        """Waits until so few jobs are under way; raises what went wrong in one that has ended."""
        while len(self._under_way) > count:
            ended, self._under_way = await asyncio.wait(
                self._under_way, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                task.result()

    async def _roll_out(self, job: Job, prompts: wire.StepPrompts) -> bool:
        """Generates, scores and delivers; whether the job's groups are complete after it."""
        finished: list[GeneratedGroup] = []
        news = asyncio.Event()

        def on_group(group: GeneratedGroup) -> None:
            finished.append(group)
            news.set()

        generating = asyncio.create_task(self._generate(job, prompts, on_group))
        generating.add_done_callback(lambda _: news.set())
        complete, left = False, len(prompts.prompts)
        try:
            while left:
                await news.wait()
                news.clear()
                if generating.done():
                    generating.result()
                elif len(finished) < BUNDLE:
                    continue
                bundle, finished[:] = finished[:], []
                left -= len(bundle)
                complete = await asyncio.to_thread(self._deliver, job, prompts, bundle)
            await asyncio.to_thread(self._spans.flush)
        finally:
            generating.cancel()
        return complete

    async def _generate(
        self,
        job: Job,
        prompts: wire.StepPrompts,
        on_group: Callable[[GeneratedGroup], None],
    ) -> None:
        weights = await self._await_weights(prompts.policy_version)
        rollout = self._config.rollout
        evaluating = job.kind == "evaluation"
        request = GenerateRequest(
            policy_version=prompts.policy_version,
            manifest_digest=weights.manifest_digest,
            temperature=(
                self._config.evaluation_temperature if evaluating else rollout.temperature
            ),
            max_tokens=rollout.max_response_tokens,
            group_size=self._config.evaluation_samples if evaluating else rollout.group_size,
            prompts=[
                PromptRequest(
                    prompt_token_ids=self._tokenize(prompt),
                    seed=derive_seed(self._config.seed, job.kind, job.step, prompt.uid),
                )
                for prompt in prompts.prompts
            ],
        )
        with self._spans.span("await weights", job.step):
            await self._fleet.until_served(request)
        with self._spans.span(job.kind, job.step):
            await self._fleet.generate(request, on_group)

    async def _await_weights(self, version: int) -> wire.StoredVersion:
        while True:
            try:
                return await run_detached(self._buffer.weights, version, wait=LONG_POLL_S)
            except ServiceError as error:
                if error.status != 404:
                    raise

    def _tokenize(self, prompt: wire.PromptItem) -> list[int]:
        token_ids = render(self._tokenizer, self._task.render(prompt.payload))
        limit = self._config.rollout.max_prompt_tokens
        if len(token_ids) > limit:
            raise BapoError(
                f"prompt {prompt.uid!r} has {len(token_ids)} tokens, more than "
                f"rollout.max_prompt_tokens ({limit}); raise the limit or drop the prompt"
            )
        return token_ids

    def _deliver(
        self, job: Job, asked: wire.StepPrompts, generated: Sequence[GeneratedGroup]
    ) -> bool:
        """Whether the job's groups are complete with these."""
        prompts = [asked.prompts[group.index] for group in generated]
        texts = [
            self._tokenizer.batch_decode(
                [response.token_ids for response in group.responses], skip_special_tokens=True
            )
            for group in generated
        ]
        with self._spans.span("verify", job.step):
            verdicts = self._verifier.verify(
                self._config.task.name,
                self._config.task.options,
                [
                    VerifyItem(payload=prompt.payload, responses=answers)
                    for prompt, answers in zip(prompts, texts, strict=True)
                ],
            )
        groups = [
            TrajectoryGroup(
                prompt_uid=prompt.uid,
                prompt_token_ids=self._tokenize(prompt),
                policy_version=group.policy_version,
                responses=[
                    TrajectoryResponse(
                        response.token_ids,
                        response.logprobs,
                        verdict.reward,
                        response.finish_reason,
                        answer,
                    )
                    for response, verdict, answer in zip(
                        group.responses, scored, answers, strict=True
                    )
                ],
            )
            for prompt, group, scored, answers in zip(
                prompts, generated, verdicts, texts, strict=True
            )
        ]
        with self._spans.span("deliver", job.step):
            accepted = self._buffer.post_groups(job.step, job.kind, encode_groups(groups))
        log.info("%d %s groups delivered", len(groups), job.kind, extra={"step": job.step})
        return accepted.complete


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The token ids of a conversation up to where the response begins."""
    rendered: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(rendered)


def tokenizer_directory(path: str, settings: CollectorSettings) -> Path:
    """Returns the directory of the initial model's tokenizer; weights are not fetched."""
    directory = model_on_disk(path, settings.model)
    if directory is not None:
        return directory
    store = ObjectStore(settings.s3)
    return fetch_model(path, store, settings.scratch / "model", weights=False)


def until_begun(buffer: BufferClient) -> wire.RunState:
    """The run, once a trainer has begun an attempt."""
    while (state := buffer.run_state()).attempt == 0:
        time.sleep(UNBEGUN_S)
    return state


def main() -> None:
    from transformers import AutoTokenizer

    from services.common.logs import configure_logs
    from services.common.process import run_until_error

    configure_logs("collector")

    def collect() -> None:
        settings = CollectorSettings.load()
        token = settings.token.get_secret_value()
        while True:
            buffer = BufferClient(settings.buffer_url, token, run=settings.run)
            pinned = settings.attempt is not None
            state = buffer.run_state() if pinned else until_begun(buffer)
            buffer.attempt = state.attempt if settings.attempt is None else settings.attempt
            try:
                collector = make(state, buffer, settings)
                asyncio.run(collector.collect(state.current_step + 1))
            except Superseded as error:
                if pinned:
                    raise
                log.warning("a new attempt has begun: %s", error)
            else:
                return

    def make(state: wire.RunState, buffer: BufferClient, settings: CollectorSettings) -> Collector:
        token = settings.token.get_secret_value()
        config = state.config
        return Collector(
            config,
            buffer,
            Fleet(buffer, token),
            VerifierClient(settings.verifier_url, token),
            AutoTokenizer.from_pretrained(tokenizer_directory(config.model.path, settings)),
        )

    run_until_error(collect)


if __name__ == "__main__":
    main()
