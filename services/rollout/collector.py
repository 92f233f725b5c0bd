"""The collector: prompts in, whole scored groups out, ahead of the trainer.

Within a sync window the rollout policy does not change, so the collector runs on to the window's
end without waiting for the trainer. Evaluations come last in a window, when the engine would
otherwise wait for new weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig
from bapo_core.seeding import derive_seed
from bapo_core.tasks import get_task
from services.buffer import wire
from services.buffer.client import LONG_POLL_S, BufferClient
from services.buffer.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.common.errors import BapoError, ServiceError
from services.rollout.client import RolloutClient
from services.rollout.wire import GenerateAnswer, GenerateRequest, PromptRequest
from services.verifier.client import VerifierClient
from services.verifier.wire import VerifyItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


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
        end = min(config.schedule.window(step).stop, config.steps + 1)
        for t in range(step, end):
            yield Job(t, "fresh")
            if config.x2.enabled and config.schedule.reevaluates_at(t):
                yield Job(t, "reevaluation")
        for t in range(step, end):
            if config.evaluates_at(t):
                yield Job(t, "evaluation")
        step = end
    yield Job(config.steps + 1, "evaluation")


class Collector:
    """Runs jobs; scores and delivers each group while the engine generates the next job."""

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        rollout: RolloutClient,
        verifier: VerifierClient,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config, self._buffer = config, buffer
        self._rollout, self._verifier, self._tokenizer = rollout, verifier, tokenizer
        self._task = get_task(config.task.name, **config.task.options)
        self._delivery = ThreadPoolExecutor(1, thread_name_prefix="deliver")
        self._delivering: Future[wire.GroupsAccepted] | None = None

    def collect(self, first_step: int) -> None:
        """All jobs from `first_step` to the end of the run."""
        for job in jobs(self._config, first_step):
            self._run(job)
        self._settled()
        self._delivery.shutdown()

    def _run(self, job: Job) -> None:
        rounds = self._config.rollout.max_generation_rounds if job.kind == "fresh" else 1
        for generation_round in range(rounds):
            prompts = self._buffer.step_prompts(job.step, job.kind, generation_round)
            if prompts.complete or not prompts.prompts:
                return
            generated = self._generate(job, prompts)
            self._settled()
            self._delivering = self._delivery.submit(self._deliver, job, prompts, generated)
            # Only dynamic sampling needs the outcome before it knows what to generate next.
            if rounds > 1 and self._settled():
                return

    def _settled(self) -> bool:
        """Waits for the delivery under way; whether its step is complete."""
        if self._delivering is None:
            return False
        accepted = self._delivering.result()
        self._delivering = None
        return accepted.complete

    def _generate(self, job: Job, prompts: wire.StepPrompts) -> GenerateAnswer:
        self._await_weights(prompts.policy_version)
        rollout = self._config.rollout
        evaluating = job.kind == "evaluation"
        request = GenerateRequest(
            policy_version=prompts.policy_version,
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
        answer = self._rollout.generate(request)
        if answer.policy_version != prompts.policy_version:
            raise BapoError(
                f"the rollout engine generated with version {answer.policy_version} instead of "
                f"{prompts.policy_version}; restart it"
            )
        return answer

    def _await_weights(self, version: int) -> None:
        while True:
            try:
                self._buffer.weights(version, wait=LONG_POLL_S)
                return
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
        self, job: Job, prompts: wire.StepPrompts, generated: GenerateAnswer
    ) -> wire.GroupsAccepted:
        texts = [
            self._tokenizer.batch_decode(
                [response.token_ids for response in group], skip_special_tokens=True
            )
            for group in generated.groups
        ]
        verdicts = self._verifier.verify(
            self._config.task.name,
            self._config.task.options,
            [
                VerifyItem(payload=prompt.payload, responses=answers)
                for prompt, answers in zip(prompts.prompts, texts, strict=True)
            ],
        )
        groups = [
            TrajectoryGroup(
                prompt_uid=prompt.uid,
                prompt_token_ids=self._tokenize(prompt),
                policy_version=generated.policy_version,
                responses=[
                    TrajectoryResponse(
                        response.token_ids,
                        response.logprobs,
                        verdict.reward,
                        response.finish_reason,
                        answer,
                    )
                    for response, verdict, answer in zip(responses, scored, answers, strict=True)
                ],
            )
            for prompt, responses, scored, answers in zip(
                prompts.prompts, generated.groups, verdicts, texts, strict=True
            )
        ]
        accepted = self._buffer.post_groups(job.step, job.kind, encode_groups(groups))
        log.info("%s groups delivered", job.kind, extra={"step": job.step})
        return accepted


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The token ids of a conversation up to where the response begins."""
    rendered: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(rendered)


def main() -> None:
    from transformers import AutoTokenizer

    from services.common.logs import configure_logs
    from services.common.process import run_until_error
    from services.common.settings import require

    configure_logs("collector")

    def collect() -> None:
        token = require("BAPO_TOKEN")
        buffer = BufferClient(
            require("BAPO_BUFFER_URL"),
            token,
            run=require("BAPO_RUN"),
            attempt=int(require("BAPO_ATTEMPT")),
        )
        state = buffer.run_state()
        config = RunConfig.model_validate(state.config)
        collector = Collector(
            config,
            buffer,
            RolloutClient(require("BAPO_ROLLOUT_URL"), token),
            VerifierClient(require("BAPO_VERIFIER_URL"), token),
            AutoTokenizer.from_pretrained(require("BAPO_MODEL")),
        )
        collector.collect(state.current_step + 1)

    run_until_error(collect)


if __name__ == "__main__":
    main()
