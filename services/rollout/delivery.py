"""Scores generated groups and delivers them to the buffer service."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bapo_core.config import RunConfig
from bapo_core.errors import RewardError
from bapo_core.outcomes import Outcome
from bapo_core.rewards import check_reward, check_reward_sign, reward_parts, total_reward
from bapo_core.tasks import Task, normalise_answer
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.model.conversation import decode_response
from services.rollout.api.wire import GeneratedGroup, GeneratedResponse, GenerateRequest
from services.rollout.unfinished import UnfinishedGroups
from services.verifier.api.client import VerifierClient
from services.verifier.api.trial import verifier_options
from services.verifier.api.wire import ItemVerdict, VerifyItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FAILURES_TO_GIVE_UP = 32
"""Responses after which a reward function that has given no verdict ends the run."""


class Delivery:
    """Scores the groups of jobs and delivers them."""

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        verifier: VerifierClient,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Mapping[str | None, Task],
        spans: SpanRecorder,
        reward_file: str | None = None,
    ) -> None:
        """tasks: the task of each evaluation set by its name; None for training prompts.

        reward_file: the text of the file of `task.reward`; None for another task.
        """
        self._config, self._buffer, self._verifier = config, buffer, verifier
        self._tokenizer, self._tasks, self._spans = tokenizer, tasks, spans
        self._options = {
            name: verifier_options(options, reward_file)
            for name, options in task_options(config).items()
        }
        check_reward(tasks[None], config.reward)
        self._judged = self._failures = 0
        """Responses so far on which the reward function gave a verdict, and on which it failed."""

    def deliver(
        self,
        job: wire.Rollouts,
        step_prompts: wire.StepPrompts,
        request: GenerateRequest,
        generated: Sequence[GeneratedGroup],
        unfinished: UnfinishedGroups,
    ) -> bool:
        """Scores and delivers groups; returns whether the job is complete with them.

        step_prompts: all prompts of the job. request: the request that the groups answer.
        unfinished: has the interruptions and lost attempts of the responses.
        """
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
        self._count_failures([verdict for group in verdicts for verdict in group])
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

    def _count_failures(self, verdicts: Sequence[ItemVerdict]) -> None:
        """Counts and logs failures of the reward function.

        Raises `RewardError` if it has failed on all responses so far, once these are enough: such a
        run would train on nothing, or on wrong rewards.
        """
        failures = [verdict for verdict in verdicts if verdict.failed]
        self._judged += len(verdicts) - len(failures)
        if not failures:
            return
        self._failures += len(failures)
        reason = failures[0].failure
        if not self._judged and self._failures >= FAILURES_TO_GIVE_UP:
            raise RewardError(
                f"the reward function of task {self._config.task.name} failed on all "
                f"{self._failures} responses so far: {reason}; "
                f"{'fix its `verify`' if self._config.task.reward is None else 'fix the function'}"
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
            verdict.is_correct(self._config.task.solved_at),
            parts,
            normalise_answer(task, verdict.extracted),
            interruptions,
            verdict.outcome,
            repeated,
            verdict.status,
            verdict.extracted,
            verdict.failure if verdict.failed else None,
        )


def task_options(config: RunConfig) -> dict[str | None, dict[str, Any]]:
    """Returns the task's options by evaluation set; None for training prompts."""
    options: dict[str | None, dict[str, Any]] = {None: config.task.arguments}
    for name, settings in config.evaluation_sets.items():
        options[name] = dict(settings.options)
    return options


def _count_repeats(engine_lost: int, verifier_lost: int) -> dict[str, int]:
    """Returns how often a response was sampled and scored again, by cause, without zeros."""
    counts = {Outcome.ENGINE_LOST: engine_lost, Outcome.VERIFIER_LOST: verifier_lost}
    return {str(cause): count for cause, count in counts.items() if count}
